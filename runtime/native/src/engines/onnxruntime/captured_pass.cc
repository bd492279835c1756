#include "engines/onnxruntime/captured_pass.h"

#include <algorithm>
#include <cstring>

#include "engines/cuda/device_cache.h"

namespace dlm {
namespace {

// In a captured pass, the numbers of scored rows and of cached rows are rounded up to these steps.
// ONNX Runtime never frees a CUDA graph, so only the first shapes of passes are captured.
constexpr size_t kRowStep = 8, kCachedStep = 64, kMostCaptured = 128;

// Copies `count` numbers, which may be 0, if there is a place for them.
template <class Number>
void copy(const Number* from, size_t count, void* to) {
  if (to != nullptr && count > 0) std::memcpy(to, from, count * sizeof(Number));
}

}  // namespace

CapturedPass::CapturedPass(const CudaDevice& device, const dlm_pass& pass, const RowChoice& rows,
                           int32_t top_k, int id)
    : device_(device),
      rows_(pass.rows),
      top_k_(top_k),
      id_(id),
      offsets_(lay_out([&] {
        const size_t tokens = 8 * static_cast<size_t>(pass.tokens),
                     cached = 8 * rows.full.rows.size(), scored = static_cast<size_t>(pass.rows),
                     candidates = 4 * scored * static_cast<size_t>(top_k);
        return std::vector<size_t>{tokens, tokens,     8 * scored, cached,     cached,
                                   tokens, candidates, candidates, candidates, 4 * scored};
      }())),
      device_memory_(device.cuda(), CudaMemory::Kind::device, offsets_.back()),
      host_memory_(device.cuda(), CudaMemory::Kind::pinned, offsets_.back()),
      stream_(create_stream(device.cuda())) {}

void CapturedPass::upload(const dlm_pass& pass, const RowChoice& rows) {
  const auto put = [&](Part part, const auto& from, size_t count) {
    copy(from, count, host_memory_.host(offsets_[part]));
  };
  const auto tokens = static_cast<size_t>(pass.tokens);
  put(kIds, pass.input_ids, tokens);
  put(kPositions, pass.position_ids, tokens);
  auto* const scored = reinterpret_cast<int64_t*>(host_memory_.host(offsets_[kScoreRows]));
  std::fill(std::copy_n(pass.score_rows, pass.rows, scored), scored + rows_, 0);
  put(kRows, rows.full.rows.data(), rows.full.rows.size());
  put(kRequests, rows.full.requests.data(), rows.full.requests.size());
  put(kOfTokens, rows.of_tokens.data(), tokens);
  const Cuda& cuda = device_.cuda();
  cuda.check(cuda.cuMemcpyHtoDAsync_v2(device_memory_.device(0), host_memory_.host(0),
                                       offsets_[kTokens], stream_.get()),
             "cuMemcpyHtoDAsync");
  // ONNX Runtime uses another stream.
  cuda.check(cuda.cuStreamSynchronize(stream_.get()), "cuStreamSynchronize");
}

Pass CapturedPass::on_device(const Pass& pass) const {
  Pass moved = pass;
  moved.rows = rows_;
  moved.input_ids = static_cast<const int64_t*>(address(kIds));
  moved.position_ids = static_cast<const int64_t*>(address(kPositions));
  moved.score_rows = static_cast<const int64_t*>(address(kScoreRows));
  moved.top_tokens = static_cast<int32_t*>(address(kTokens));
  moved.top_probs = static_cast<float*>(address(kProbs));
  moved.top_log_odds = static_cast<float*>(address(kLogOdds));
  moved.entropy = static_cast<float*>(address(kEntropy));
  return moved;
}

void CapturedPass::download(const dlm_pass& pass) {
  const Cuda& cuda = device_.cuda();
  const size_t first = offsets_[kTokens], bytes = offsets_[kEnd] - first;
  cuda.check(cuda.cuMemcpyDtoHAsync_v2(host_memory_.host(first), device_memory_.device(first),
                                       bytes, stream_.get()),
             "cuMemcpyDtoHAsync");
  cuda.check(cuda.cuStreamSynchronize(stream_.get()), "cuStreamSynchronize");
  const auto take = [&](Part part, auto* to, size_t count) {
    copy(reinterpret_cast<const decltype(to)>(host_memory_.host(offsets_[part])), count, to);
  };
  const auto rows = static_cast<size_t>(pass.rows), candidates = rows * static_cast<size_t>(top_k_);
  take(kTokens, pass.top_tokens, candidates);
  take(kProbs, pass.top_probs, candidates);
  take(kLogOdds, pass.top_log_odds, candidates);
  take(kEntropy, pass.entropy, rows);
}

CapturedPass* CapturedPasses::find(dlm_pass& pass, RowChoice& rows) {
  pass.rows = static_cast<int32_t>(rounded_up(static_cast<size_t>(pass.rows), kRowStep));
  rows.full.pad(rounded_up(rows.full.rows.size(), kCachedStep));
  PassShape shape = {static_cast<uint64_t>(pass.tokens), static_cast<uint64_t>(pass.cached),
                     static_cast<uint64_t>(pass.rows), rows.full.rows.size()};
  const auto add_addresses = [&](const auto* const* list) {
    for (size_t i = 0; list != nullptr && i < graph_.cache.size(); ++i)
      shape.push_back(reinterpret_cast<uintptr_t>(list[i]));
  };
  add_addresses(pass.past_keys), add_addresses(pass.past_values);
  add_addresses(pass.present_keys), add_addresses(pass.present_values);
  auto found = passes_.find(shape);
  if (found == passes_.end() && passes_.size() < kMostCaptured)
    found =
        passes_
            .try_emplace(shape, device_, pass, rows, graph_.top_k, static_cast<int>(passes_.size()))
            .first;
  return found == passes_.end() ? nullptr : &found->second;
}

}  // namespace dlm
