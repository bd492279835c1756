// Requests whose every allocation fails once, over the C ABI: each ends with a status, nothing leaks, and the session takes the next
// one. Prints "N allocations failed"; the exit status is 1 if a claim did not hold.
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <initializer_list>
#include <new>

#include "dlm_runtime.h"

namespace {

long allocations_left = -1;  // before one fails; negative: none does

void* allocate(std::size_t bytes) {
  if (allocations_left == 0) throw std::bad_alloc();
  if (allocations_left > 0) --allocations_left;
  void* const found = std::malloc(bytes == 0 ? 1 : bytes);
  if (found == nullptr) throw std::bad_alloc();
  return found;
}

constexpr int32_t kVocab = 40, kMask = 39, kEos = 5, kLength = 24;

dlm_status run(void*, const dlm_pass* pass) {
  for (int32_t row = 0; row < pass->batch * pass->rows; ++row) {
    const int64_t position = pass->position_ids[row / pass->rows * pass->tokens + pass->score_rows[row]];
    const auto token = static_cast<int32_t>(6 + position % 30);
    pass->top_tokens[2 * row] = token, pass->top_tokens[2 * row + 1] = token + 1;
    pass->top_probs[2 * row] = 0.5f, pass->top_probs[2 * row + 1] = 0.25f;
    if (pass->entropy != nullptr) pass->entropy[row] = -1;
    for (int32_t v = 0; pass->logits != nullptr && v < kVocab; ++v)
      pass->logits[row * kVocab + v] = v == token ? 3.0f : static_cast<float>((v * 7 + token) % 16) / 8;
  }
  return DLM_OK;
}

dlm_status generate(dlm_session* session, const dlm_generate_options& options, int32_t max_batch, dlm_result* result) {
  int32_t canvases[3][kLength] = {{1, 2}, {2, 3}, {3, 4}};
  dlm_request requests[3] = {};
  for (int i = 0; i < 3; ++i) requests[i].tokens = canvases[i], requests[i].count = 2, requests[i].capacity = kLength;
  size_t length = 0;
  const dlm_status status = max_batch > 0 ? dlm_session_generate_batch(session, &options, requests, 3, max_batch, nullptr)
                                          : dlm_session_generate(session, &options, canvases[0], 2, kLength, nullptr, &length);
  if (status != DLM_OK) return status;
  return dlm_session_result(session, max_batch > 0 ? 2 : 0, result);
}

}  // namespace

void* operator new(std::size_t bytes) { return allocate(bytes); }
void* operator new[](std::size_t bytes) { return allocate(bytes); }
void operator delete(void* pointer) noexcept { std::free(pointer); }
void operator delete[](void* pointer) noexcept { std::free(pointer); }
void operator delete(void* pointer, std::size_t) noexcept { std::free(pointer); }
void operator delete[](void* pointer, std::size_t) noexcept { std::free(pointer); }

int main() {
  dlm_denoiser denoiser;
  dlm_denoiser_init(&denoiser);
  denoiser.vocab_size = kVocab, denoiser.mask_token_id = kMask, denoiser.max_canvas_length = 64;
  denoiser.layers = denoiser.kv_heads = denoiser.head_size = denoiser.has_cache = 1;
  denoiser.eos_token_ids = &kEos, denoiser.eos_count = 1;
  dlm_bundle* bundle = nullptr;
  if (dlm_bundle_from_callback(&denoiser, run, nullptr, nullptr, 0, &bundle) != DLM_OK) return 1;
  dlm_policy policy;
  dlm_policy_init(&policy);
  policy.block_length = 8, policy.cache = "dual", policy.select = "sample", policy.temperature = 1, policy.top_p = 0.9;
  policy.cfg_scale = 1;
  dlm_generate_options options;
  dlm_generate_options_init(&options);
  options.policy = &policy, options.max_new_tokens = kLength - 2, options.deadline_ms = 1e9;
  int failures = 0, wrong = 0;
  for (const int32_t max_batch : {0, 2}) {
    for (long number = 0;; ++number) {
      dlm_session* session = nullptr;
      dlm_result result;
      if (dlm_session_create(bundle, nullptr, 0, &session) != DLM_OK) return 1;
      allocations_left = number;
      const dlm_status status = generate(session, options, max_batch, &result);
      allocations_left = -1;
      dlm_session_cancel(session, DLM_ALL_REQUESTS);  // nothing runs
      wrong += status != DLM_OK && status != DLM_OUT_OF_MEMORY;
      wrong += generate(session, options, max_batch, &result) != DLM_OK;
      wrong += result.finish != DLM_FINISH_LENGTH || result.length != kLength || !std::isnan(result.log_probs[1]);
      dlm_session_destroy(session);
      if (status == DLM_OK) break;
      ++failures;
    }
  }
  dlm_bundle_destroy(bundle);
  std::printf("%d allocations failed, %d claims did\n", failures, wrong);
  return wrong == 0 && failures > 20 ? 0 : 1;
}
