# docker build -f deploy/operator.Dockerfile -t infinite-llm-operator .
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
# The operator deals with objects as JSON has them: the client's generated classes can stay away.
RUN pip --python /opt/venv install --no-cache-dir --no-compile '.[operator]' \
    && find /opt/venv/lib/python3*/site-packages/kubernetes -name '*.py' ! -name __init__.py \
      \( -path '*/client/models/*' -o -path '*/client/api/*' \) -delete

FROM ${BASE}
WORKDIR /app
COPY --from=python /opt/venv /opt/venv
COPY --from=tools /build/protos protos
COPY charts/infinite-llm/crds crds
COPY services/__init__.py services/
COPY services/common services/common
COPY services/operator services/operator
ENV PATH=/opt/venv/bin:$PATH HOME=/app PYTHONUNBUFFERED=1
# Compiles what a start imports: the root is read-only where this runs.
RUN python -c 'import services.operator.__main__'
USER 65532:65532
ENTRYPOINT ["python", "-m", "services.operator"]
