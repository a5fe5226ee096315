# docker build -f deploy/gmanager.Dockerfile -t infinite-llm-gmanager .
ARG BASE=python:3.11-slim-bookworm

# What only the build needs; the same in all images, so that it is built once.
FROM ${BASE} AS tools
WORKDIR /build
COPY pyproject.toml README.md LICENSE ./
RUN python -m venv /tools && /tools/bin/pip install --no-cache-dir '.[stubs,models]'
COPY protos protos
RUN /tools/bin/python -m grpc_tools.protoc -I. --python_out=. --grpc_python_out=. \
    protos/infinite_llm/v1/*.proto

FROM ${BASE} AS python
WORKDIR /build
COPY pyproject.toml README.md LICENSE ./
RUN python -m venv --without-pip /opt/venv
RUN pip --python /opt/venv install --no-cache-dir --no-compile '.[gmanager]'

FROM ${BASE}
WORKDIR /app
COPY --from=python /opt/venv /opt/venv
COPY --from=tools /build/protos protos
COPY services/__init__.py services/
COPY services/common services/common
COPY services/gmanager services/gmanager
ENV PATH=/opt/venv/bin:$PATH HOME=/app PYTHONUNBUFFERED=1
# Compiles what a start imports: the root is read-only where this runs.
RUN python -c 'import services.gmanager.__main__'
USER 65532:65532
ENTRYPOINT ["python", "-m", "services.gmanager"]
