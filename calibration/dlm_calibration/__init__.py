"""States a denoiser meets while it unmasks a canvas: to check parity on, and to calibrate with."""
