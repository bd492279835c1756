# An image of `dlm-export serve` for a Jetson Orin with JetPack 6.1 or 6.2, built on the board in the root of the repository:
#   docker build -f examples/serve/jetson.Dockerfile -t dlm-serve-jetson .
#   docker run --runtime nvidia -p 8000:8000 -v "$PWD/build/bundle:/bundles/bundle:ro" -v "$PWD/keys:/keys:ro" dlm-serve-jetson
# The base image contains Ubuntu 22.04, CUDA, cuDNN and TensorRT with headers and the Python module.
FROM nvcr.io/nvidia/l4t-jetpack:r36.4.0
SHELL ["/bin/bash", "-o", "pipefail", "-c"]
# hadolint ignore=DL3008
RUN apt-get update \
 && apt-get install -y --no-install-recommends g++ git python3-venv \
 && rm -rf /var/lib/apt/lists/*
WORKDIR /source
COPY . .
RUN python3 -m venv --system-site-packages /opt/dlm \
 && /opt/dlm/bin/pip install --no-cache-dir -c constraints.txt '.[serve]' \
      -C cmake.define.DLM_TENSORRT_INCLUDE_DIR=/usr/include/aarch64-linux-gnu
# Processes that use the GPU of a Jetson must be in the group video.
RUN useradd --system --uid 10001 --no-create-home --groups video dlm
USER 10001
WORKDIR /
ENV PATH=/opt/dlm/bin:$PATH NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility
EXPOSE 8000
HEALTHCHECK --start-period=300s CMD ["python3", "-c", "import urllib.request as u; u.urlopen('http://127.0.0.1:8000/ready', timeout=2)"]
ENTRYPOINT ["dlm-export", "serve", "--host", "0.0.0.0"]
CMD ["/bundles/bundle", "--api-key-file", "/keys"]
