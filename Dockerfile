FROM python:3.12-slim
COPY . /src
RUN pip install --no-cache-dir "/src[hub,parquet,probe,onnx]" && rm -rf /src
WORKDIR /data
ENTRYPOINT ["vitcli"]
