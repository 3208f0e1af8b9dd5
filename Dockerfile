# An image for machines with NVIDIA GPUs, Transformer Engine compiled in:
#   docker build -t lightning-llm .
#   docker run --gpus all --ipc host -v lightning-llm:/outputs lightning-llm train recipe=quickstart
# Runs as user 10001, who owns a fresh volume; a folder of the host has to be writable by that user.
# For CPU alone: docker build --build-arg BASE=ubuntu:24.04 --build-arg EXTRAS= -t lightning-llm:cpu .
ARG BASE=nvidia/cuda:13.0.1-cudnn-devel-ubuntu24.04
FROM ${BASE}
ARG EXTRAS=te

# Versions of the base image's own release: pinning them would tie the image to one day's package mirror.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends build-essential git python3 python3-dev python3-venv \
    && rm -rf /var/lib/apt/lists/*

RUN useradd --create-home --uid 10001 trainer && mkdir /outputs && chown trainer /outputs && python3 -m venv /opt/venv
ENV PATH=/opt/venv/bin:${PATH} LIGHTNING_LLM_OUTPUTS=/outputs

WORKDIR /opt/lightning-llm
COPY requirements/ requirements/
# torch first, by itself: Transformer Engine compiles against the one that is installed.
RUN pip install --no-cache-dir -c requirements/dev.txt torch setuptools wheel
COPY . .
RUN pip install --no-cache-dir --no-build-isolation -c requirements/dev.txt ".${EXTRAS:+[${EXTRAS}]}"

USER 10001
WORKDIR /outputs
ENTRYPOINT ["lightning-llm"]
CMD ["--help"]
