"""Results as tables, JSON and figures: the only place that shows anything."""
