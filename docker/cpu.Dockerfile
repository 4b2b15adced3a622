# syntax=docker/dockerfile:1.7
# The demo on a CPU: the real Megatron-Core, vLLM and Ray. From the repository's root:
#
#   docker build -f docker/cpu.Dockerfile -t megatron-dppo:cpu .
#   docker run --rm --shm-size 2g -v "$PWD/runs:/opt/megatron-dppo/runs" megatron-dppo:cpu
ARG BASE_IMAGE=python:3.12-slim-bookworm

FROM ${BASE_IMAGE} AS build
ENV PIP_DISABLE_PIP_VERSION_CHECK=1 UV_LINK_MODE=copy
RUN python -m venv /opt/venv
ENV PATH=/opt/venv/bin:$PATH VIRTUAL_ENV=/opt/venv
WORKDIR /build
COPY constraints/bootstrap.txt constraints/cpu.txt constraints/cpu-overrides.txt constraints/
RUN --mount=type=cache,target=/root/.cache/pip python -m pip install -r constraints/bootstrap.txt
COPY pyproject.toml README.md LICENSE ./
RUN --mount=type=cache,target=/root/.cache/uv \
    uv pip install --override constraints/cpu-overrides.txt -c constraints/cpu.txt -r pyproject.toml --extra cpu
COPY megatron_dppo megatron_dppo
RUN --mount=type=cache,target=/root/.cache/uv uv pip install --no-deps .

FROM ${BASE_IMAGE} AS runtime
SHELL ["/bin/bash", "-o", "pipefail", "-c"]
# Debian's archive drops a package's old versions: a pinned one would stop building within weeks.
# hadolint ignore=DL3008
RUN apt-get update \
 && apt-get install -y --no-install-recommends gcc libc6-dev libnuma1 tini \
 && rm -rf /var/lib/apt/lists/* \
 && groupadd --gid 10001 dppo \
 && useradd --uid 10001 --gid dppo --create-home --shell /bin/bash dppo \
 && install -d -o dppo -g dppo /opt/megatron-dppo /opt/megatron-dppo/runs
COPY --from=build /opt/venv /opt/venv
COPY --chown=10001:10001 examples /opt/megatron-dppo/examples
COPY --chown=10001:10001 docker/start_node.sh /opt/megatron-dppo/start_node.sh
ENV PATH=/opt/venv/bin:$PATH \
    VIRTUAL_ENV=/opt/venv \
    PYTHON=/opt/venv/bin/python \
    PYTHONUNBUFFERED=1 \
    RAY_USAGE_STATS_ENABLED=0
USER 10001:10001
WORKDIR /opt/megatron-dppo
VOLUME /opt/megatron-dppo/runs
HEALTHCHECK --interval=60s --timeout=20s --start-period=120s --retries=3 \
  CMD ["python", "-m", "megatron_dppo.launch.health", "/opt/megatron-dppo/runs"]
ENTRYPOINT ["/usr/bin/tini", "--"]
CMD ["bash", "examples/run_tiny_moe_dppo.sh"]
