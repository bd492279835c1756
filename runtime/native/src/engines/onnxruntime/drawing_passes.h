// Passes of ONNX Runtime whose logits stay on a CUDA device, where their tokens are drawn.
#pragma once

#include <functional>
#include <memory>
#include <mutex>
#include <vector>

#include "engines/cuda/cuda_api.h"
#include "engines/cuda/device_draws.h"
#include "engines/engine.h"

namespace dlm {

class DrawingPasses {
 public:
  // The device must outlive this object. Its context must be current when the object is destroyed.
  DrawingPasses(const CudaDevice& device, const Log& log) : device_(device), kernel_(device, log) {}

  // See DrawKernel::is_ready.
  bool is_ready() const { return kernel_.is_ready(); }

  // Calls run(pass) with a copy of the pass whose `logits` are in device memory, and then draws
  // from these logits. Several threads may call this function at the same time.
  void run(const Pass& pass, int32_t top_k, const std::function<void(const Pass&)>& run);

 private:
  // Memory for the draws of one pass.
  struct Memory {
    Memory(const DrawKernel& kernel) : draws(kernel), stream(create_stream(kernel.cuda())) {}
    DeviceDraws draws;
    CudaStream stream;
    std::unique_ptr<CudaMemory> logits{};
  };

  std::unique_ptr<Memory> take();
  void make_room(Memory& memory, size_t bytes) const;

  const CudaDevice& device_;
  const DrawKernel kernel_;
  std::mutex mutex_;
  std::vector<std::unique_ptr<Memory>> spare_;  // those that no pass uses now
};

}  // namespace dlm
