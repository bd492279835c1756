"""The planning room: the shape of a denoiser and a device in, time, memory and cost out, predicted
or measured.

``shapes`` reads sizes from a bundle, a checkpoint or a wish, ``roofline`` says what a pass cannot
beat, ``plan`` makes tables of it for many devices. ``bench`` measures a bundle on this machine, and
``measured`` scales predictions by that. Needs no torch and no onnx for a bundle.
"""
