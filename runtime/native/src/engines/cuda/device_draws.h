// Draws the tokens of passes whose logits are in the memory of a CUDA device. Only what a request
// reads is copied to the host: tokens, probabilities and entropies.
#pragma once

#include <memory>
#include <mutex>
#include <vector>

#include "engines/cuda/cuda_api.h"
#include "engines/engine.h"

namespace dlm {

// The kernel of engines/cuda/draw_kernel.h on one device.
class DrawKernel {
 public:
  // The device must outlive this object.
  DrawKernel(const CudaDevice& device, const Log& log) : device_(device), log_(log) {}
  ~DrawKernel();
  DrawKernel(const DrawKernel&) = delete;
  DrawKernel& operator=(const DrawKernel&) = delete;

  // Returns true if the kernel can run. The first call compiles the kernel. If that fails, writes
  // one line to the log. Any thread may call this function.
  bool is_ready() const;

  const Cuda& cuda() const { return device_.cuda(); }
  CUfunction function() const { return function_; }

 private:
  void load() const;

  const CudaDevice& device_;
  const Log log_;
  mutable std::once_flag once_;
  mutable CUmodule module_ = nullptr;
  mutable CUfunction function_ = nullptr;
};

// The memory that one session needs for its draws. The device's context must be current in all
// calls, also when the object is destroyed.
class DeviceDraws {
 public:
  explicit DeviceDraws(const DrawKernel& kernel) : kernel_(kernel) {}

  // Queues the draws of a pass on the stream. `logits` is the address of the logits [R, V] on the
  // device. `top_k` is the number of candidates of a row.
  void queue(const Pass& pass, CUdeviceptr logits, int32_t top_k, CUstream stream);
  // Copies the results to the pass. The caller must have waited for the stream.
  void take(const Pass& pass) const;

 private:
  // The arrays in device memory, with copies in pinned host memory.
  enum Part { kRows, kUnused, kDrawn, kTokens, kProbs, kLogOdds, kEntropy, kEnd };

  void make_room(size_t rows, size_t unused);

  const DrawKernel& kernel_;
  size_t top_k_ = 0;
  std::vector<size_t> offsets_;
  std::unique_ptr<CudaMemory> memory_, staging_;
};

}  // namespace dlm
