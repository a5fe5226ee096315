# docker build -f deploy/router.Dockerfile -t infinite-llm-router .
ARG BASE=python:3.11-slim-bookworm

# What only the build needs; the same in all images, so that it is built once.
FROM ${BASE} AS tools
WORKDIR /build
COPY pyproject.toml README.md LICENSE ./
RUN python -m venv /tools && /tools/bin/pip install --no-cache-dir '.[stubs,models]'
COPY protos protos
RUN /tools/bin/python -m grpc_tools.protoc -I. --python_out=. --grpc_python_out=. \
    protos/infinite_llm/v1/*.proto

# The model that the image carries; MODEL="" leaves it out.
FROM tools AS model
ARG MODEL=smollm2-135m-instruct
COPY services/__init__.py services/
COPY services/common/__init__.py services/common/errors.py services/common/ids.py services/common/
COPY services/common/model_store services/common/model_store
RUN mkdir /cache && if [ -n "$MODEL" ]; then \
    XDG_CACHE_HOME=/cache /tools/bin/python -m services.common.model_store "$MODEL"; fi \
    && find /cache -name '*.safetensors' -delete

FROM ${BASE} AS python
WORKDIR /build
COPY pyproject.toml README.md LICENSE ./
RUN python -m venv --without-pip /opt/venv
RUN pip --python /opt/venv install --no-cache-dir --no-compile '.[router]'

FROM ${BASE}
WORKDIR /app
COPY --from=python /opt/venv /opt/venv
COPY --from=tools /build/protos protos
COPY --from=model /cache .cache
COPY services/__init__.py services/
COPY services/common services/common
COPY services/router services/router
ENV PATH=/opt/venv/bin:$PATH HOME=/app PYTHONUNBUFFERED=1
# Compiles what a start imports: the root is read-only where this runs.
RUN python -c 'import services.router.__main__'
USER 65532:65532
ENTRYPOINT ["python", "-m", "services.router"]
