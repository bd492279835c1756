#include "engines/onnxruntime/drawing_passes.h"

#include <utility>

#include "base/error.h"

namespace dlm {

std::unique_ptr<DrawingPasses::Memory> DrawingPasses::take() {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (!spare_.empty()) {
      auto memory = std::move(spare_.back());
      spare_.pop_back();
      return memory;
    }
  }
  return std::make_unique<Memory>(kernel_);
}

void DrawingPasses::make_room(Memory& memory, size_t bytes) const {
  if (memory.logits != nullptr && memory.logits->bytes() >= bytes) return;
  memory.logits.reset();
  const CudaDevice::Memory left = device_.memory();
  if (bytes > left.free)
    fail(DLM_OUT_OF_MEMORY,
         "the logits of a pass need %zu MiB of the device, but %zu of its %zu MiB are free: choose "
         "a smaller block_length or max_batch",
         in_mib(bytes), in_mib(left.free), in_mib(left.total));
  memory.logits = std::make_unique<CudaMemory>(kernel_.cuda(), CudaMemory::Kind::device, bytes);
}

void DrawingPasses::run(const Pass& pass, int32_t top_k,
                        const std::function<void(const Pass&)>& run) {
  const CudaDevice::Use use(device_);
  std::unique_ptr<Memory> memory = take();
  make_room(*memory, pass.draws->rows.size() * sizeof(float) *
                         static_cast<size_t>(pass.draws->denoiser->vocab_size));
  Pass drawing = pass;
  drawing.logits = reinterpret_cast<float*>(memory->logits->device(0));
  run(drawing);
  // ONNX Runtime has waited for the pass, so the draws need not wait for its stream.
  const Cuda& cuda = kernel_.cuda();
  memory->draws.queue(pass, memory->logits->device(0), top_k, memory->stream.get());
  cuda.check(cuda.cuStreamSynchronize(memory->stream.get()), "cuStreamSynchronize");
  memory->draws.take(pass);
  const std::lock_guard<std::mutex> lock(mutex_);
  spare_.push_back(std::move(memory));
}

}  // namespace dlm
