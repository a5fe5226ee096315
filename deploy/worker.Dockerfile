# docker build -f deploy/worker.Dockerfile -t infinite-llm-worker .
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
    XDG_CACHE_HOME=/cache /tools/bin/python -m services.common.model_store "$MODEL"; fi

# The kernels for every level of CPU that has one: the image has no compiler.
FROM ${BASE} AS kernels
RUN apt-get update -qq && apt-get install -y -qq --no-install-recommends g++
WORKDIR /build
COPY kernels/native kernels/native
RUN python kernels/native/build.py /kernels

FROM ${BASE} AS python
WORKDIR /build
RUN python -m venv --without-pip /opt/venv
# The index that has torch without CUDA; where it cannot be reached, other sources are tried.
ARG TORCH=torch==2.13.0
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
RUN pip --python /opt/venv install --no-cache-dir --no-compile --no-deps \
      --extra-index-url "$TORCH_INDEX" "$TORCH" \
    && cd /opt/venv/lib/python3*/site-packages/torch && rm -rf include test \
    && find bin -type f ! -name torch_shm_manager -delete
COPY pyproject.toml README.md LICENSE ./
RUN pip --python /opt/venv install --no-cache-dir --no-compile '.[worker]'

FROM ${BASE}
WORKDIR /app
COPY --from=python /opt/venv /opt/venv
COPY --from=tools /build/protos protos
COPY --from=model /cache .cache
COPY --from=kernels /kernels .cache/infinite-llm/kernels
COPY kernels kernels
COPY services/__init__.py services/
COPY services/common services/common
COPY services/worker services/worker
ENV PATH=/opt/venv/bin:$PATH HOME=/app PYTHONUNBUFFERED=1
# Compiles what a start imports: the root is read-only where this runs.
RUN python -c 'import services.worker.__main__'
USER 65532:65532
ENTRYPOINT ["python", "-m", "services.worker"]
