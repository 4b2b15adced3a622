# syntax=docker/dockerfile:1.7
# The demo on a CPU: the real Megatron-Core, vLLM and Ray. From the repository's root:
#
#   docker build -f docker/cpu.Dockerfile -t megatron-dppo:cpu .
#   mkdir -p runs
#   docker run --rm --shm-size 2g --user "$(id -u):$(id -g)" -v "$PWD/runs:/opt/megatron-dppo/runs" megatron-dppo:cpu
#   docker run --rm --shm-size 2g megatron-dppo:cpu bash docker/check_image.sh
#
# Without --user it is user 10001, for whom a host's folder must be writable.
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
 && install -d -m 1777 /opt/megatron-dppo /opt/megatron-dppo/runs /opt/megatron-dppo/models \
 && chmod 1777 /home/dppo
COPY --from=build /opt/venv /opt/venv
COPY --chown=10001:10001 examples /opt/megatron-dppo/examples
COPY --chown=10001:10001 tools /opt/megatron-dppo/tools
COPY --chown=10001:10001 docker/start_node.sh docker/check_image.sh /opt/megatron-dppo/docker/
ENV PATH=/opt/venv/bin:$PATH \
    VIRTUAL_ENV=/opt/venv \
    PYTHON=/opt/venv/bin/python \
    PYTHONUNBUFFERED=1 \
    HOME=/home/dppo USER=dppo \
    RAY_USAGE_STATS_ENABLED=0
USER 10001:10001
WORKDIR /opt/megatron-dppo
VOLUME /opt/megatron-dppo/runs
HEALTHCHECK --interval=60s --timeout=20s --start-period=120s --retries=3 \
  CMD ["python", "-m", "megatron_dppo.launch.heartbeat", "/opt/megatron-dppo/runs"]
ENTRYPOINT ["/usr/bin/tini", "--"]
CMD ["bash", "examples/run_tiny_moe_dppo.sh"]
