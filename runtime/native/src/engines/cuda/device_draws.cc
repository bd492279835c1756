#include "engines/cuda/device_draws.h"

#include <algorithm>
#include <cstring>
#include <string>

#include "base/error.h"
#include "engines/cuda/device_cache.h"
#include "engines/cuda/draw_kernel.h"
#include "engines/cuda/nvrtc.h"

namespace dlm {

DrawKernel::~DrawKernel() {
  if (module_ == nullptr) return;
  const CudaDevice::Use use(device_, std::nothrow);
  cuda().cuModuleUnload(module_);
}

bool DrawKernel::is_ready() const {
  std::call_once(once_, [&] {
    try {
      load();
    } catch (const Error& error) {
      if (log_.on_log == nullptr || DLM_LOG_WARNING < log_.severity) return;
      log_.write(DLM_LOG_WARNING,
                 (std::string("draws and guidance run on the host, which copies all logits: ") +
                  error.what())
                     .c_str());
    }
  });
  return function_ != nullptr;
}

void DrawKernel::load() const {
  const std::string code = compile_draw_kernel(device_.sm());
  const CudaDevice::Use use(device_);
  cuda().check(cuda().cuModuleLoadData(&module_, code.data()), "cuModuleLoadData");
  cuda().check(cuda().cuModuleGetFunction(&function_, module_, kDrawKernel), "cuModuleGetFunction");
}

void DeviceDraws::make_room(size_t rows, size_t unused) {
  const size_t candidates = 4 * rows * top_k_;
  offsets_ = lay_out({rows * sizeof(DrawRow), 8 * unused, rows * sizeof(Drawn), candidates,
                      candidates, candidates, 4 * rows});
  if (memory_ != nullptr && memory_->bytes() >= offsets_.back()) return;
  memory_.reset(), staging_.reset();
  using Kind = CudaMemory::Kind;
  memory_ = std::make_unique<CudaMemory>(kernel_.cuda(), Kind::device, offsets_.back());
  staging_ = std::make_unique<CudaMemory>(kernel_.cuda(), Kind::pinned, offsets_.back());
}

void DeviceDraws::queue(const Pass& pass, CUdeviceptr logits, int32_t top_k, CUstream stream) {
  const Cuda& cuda = kernel_.cuda();
  const Draws& draws = *pass.draws;
  const Denoiser& denoiser = *draws.denoiser;
  const auto& unused = denoiser.unused_tokens;
  top_k_ = static_cast<size_t>(top_k);
  make_room(draws.rows.size(), unused.size());
  std::memcpy(staging_->host(offsets_[kRows]), draws.rows.data(),
              draws.rows.size() * sizeof(DrawRow));
  auto* const ids = reinterpret_cast<int32_t*>(staging_->host(offsets_[kUnused]));
  for (size_t i = 0; i < unused.size(); ++i)
    ids[2 * i] = unused[i].first, ids[2 * i + 1] = unused[i].second;
  cuda.check(
      cuda.cuMemcpyHtoDAsync_v2(memory_->device(0), staging_->host(0), offsets_[kDrawn], stream),
      "cuMemcpyHtoDAsync");
  const auto at = [&](Part part, auto* of_type) {
    return reinterpret_cast<decltype(of_type)>(memory_->device(offsets_[part]));
  };
  draw_kernel::Arguments arguments{};
  arguments.logits = reinterpret_cast<float*>(logits);
  arguments.rows = at(kRows, arguments.rows);
  arguments.unused = at(kUnused, arguments.unused);
  arguments.drawn = at(kDrawn, arguments.drawn);
  arguments.tokens = at(kTokens, arguments.tokens);
  arguments.probs = at(kProbs, arguments.probs);
  arguments.log_odds = at(kLogOdds, arguments.log_odds);
  arguments.entropy = at(kEntropy, arguments.entropy);
  arguments.unused_count = static_cast<int32_t>(unused.size());
  arguments.vocab_size = denoiser.vocab_size;
  arguments.left_out = denoiser.mask_token_id;
  arguments.top_k = top_k;
  void* parameters[] = {&arguments};
  cuda.check(cuda.cuLaunchKernel(kernel_.function(), static_cast<unsigned>(draws.rows.size()), 1, 1,
                                 draw_kernel::kThreads, 1, 1, 0, stream, parameters, nullptr),
             "cuLaunchKernel");
  const size_t first = offsets_[kDrawn];
  cuda.check(cuda.cuMemcpyDtoHAsync_v2(staging_->host(first), memory_->device(first),
                                       offsets_[kEnd] - first, stream),
             "cuMemcpyDtoHAsync");
}

void DeviceDraws::take(const Pass& pass) const {
  Draws& draws = *pass.draws;
  std::memcpy(draws.drawn.data(), staging_->host(offsets_[kDrawn]),
              draws.rows.size() * sizeof(Drawn));
  for (size_t row = 0; row < draws.rows.size(); ++row) {
    if (!draws.rows[row].is_guided) continue;
    const auto take = [&](Part part, auto* to, size_t count) {
      using Number = std::remove_pointer_t<decltype(to)>;
      std::memcpy(to + row * count, staging_->host(offsets_[part]) + row * count * sizeof(Number),
                  count * sizeof(Number));
    };
    take(kTokens, pass.top_tokens, top_k_);
    take(kProbs, pass.top_probs, top_k_);
    take(kLogOdds, pass.top_log_odds, top_k_);
    take(kEntropy, pass.entropy, 1);
  }
}

}  // namespace dlm
