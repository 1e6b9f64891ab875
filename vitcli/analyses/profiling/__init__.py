"""Parts of `vitcli profile`: the machine, memory, and the components' share of the time."""
