"""The TensorRT room: a bundle's device graph in, engines out, with what they take and what they
hold.

``estimate`` counts memory before anything is built, ``builders`` finds the TensorRT that can build
for a device, ``engine`` runs it, ``audit`` reads back what a layer is held in, ``bundled`` puts an
engine into a bundle that stands, or takes it out. Needs no torch and no onnx: a board finishes its
own engine. API and limits: docs.nvidia.com/deeplearning/tensorrt (10.x, 11.x) and
docs.nvidia.com/deeplearning/tensorrt-rtx (1.x).
"""
