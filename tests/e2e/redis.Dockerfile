# A Redis for clusters that cannot pull the official image.
ARG BASE=python:3.11-slim-bookworm
FROM ${BASE}
RUN apt-get update -qq && apt-get install -y -qq --no-install-recommends redis-server \
    && rm -rf /var/lib/apt/lists/*
USER 65532:65532
ENTRYPOINT ["redis-server"]
