# An image of `dlm-export serve` for bundles of the target cuda, built in the root of the repository:
#   docker build -f examples/serve/cuda.Dockerfile -t dlm-serve-cuda .
#   docker run --gpus all -p 8000:8000 -v "$PWD/build/bundle:/bundles/bundle:ro" -v "$PWD/keys:/keys:ro" dlm-serve-cuda
# CUDA and cuDNN come from PyPI. The NVIDIA Container Toolkit adds the driver when a container starts.
FROM python:3.12-slim-bookworm AS build
SHELL ["/bin/bash", "-o", "pipefail", "-c"]
# hadolint ignore=DL3008
RUN apt-get update \
 && apt-get install -y --no-install-recommends g++ git \
 && rm -rf /var/lib/apt/lists/*
WORKDIR /source
COPY . .
# onnxruntime and onnxruntime-gpu use the same folder, so only one of them may be installed.
RUN python -m venv /opt/dlm \
 && /opt/dlm/bin/pip install --no-cache-dir -c constraints.txt '.[serve,gpu]' \
 && /opt/dlm/bin/pip uninstall -y onnxruntime onnxruntime-gpu \
 && /opt/dlm/bin/pip install --no-cache-dir -c constraints.txt onnxruntime-gpu

FROM python:3.12-slim-bookworm
COPY --from=build /opt/dlm /opt/dlm
RUN useradd --system --uid 10001 --no-create-home dlm
USER 10001
ENV PATH=/opt/dlm/bin:$PATH NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility
EXPOSE 8000
HEALTHCHECK --start-period=300s CMD ["python", "-c", "import urllib.request as u; u.urlopen('http://127.0.0.1:8000/ready', timeout=2)"]
ENTRYPOINT ["dlm-export", "serve", "--host", "0.0.0.0", "--provider", "cuda"]
CMD ["/bundles/bundle", "--api-key-file", "/keys"]
