// An engine that calls a function of the program for each pass. Tests use this engine to run a
// denoiser in torch.
#include <algorithm>
#include <limits>

#include "base/error.h"
#include "engines/engine.h"

namespace dlm {
namespace {

class Callback final : public HostEngine {
 public:
  Callback(dlm_pass_fn function, void* user, const Denoiser& denoiser)
      // The library does not know which layers of a denoiser with draft passes have a window.
      : HostEngine(denoiser.cache, denoiser.draft_block > 0),
        function_(function),
        user_(user),
        vocab_size_(denoiser.vocab_size),
        mask_token_id_(denoiser.mask_token_id),
        top_k_(denoiser.top_k) {}

  void run(const Pass& pass, const std::vector<Segment>&, const WindowRows&) override {
    const size_t rows = static_cast<size_t>(pass.batch) * pass.rows;
    std::fill_n(pass.top_log_odds, rows * top_k_, std::numeric_limits<float>::quiet_NaN());
    const dlm_status status = function_(user_, &pass);
    if (status != DLM_OK)
      fail(status, "the pass callback returned %d (%s)", static_cast<int>(status),
           dlm_status_name(status));
    if (pass.logits == nullptr) return;
    for (size_t row = 0; row < rows; ++row)
      if (!is_usable(pass.logits + row * vocab_size_))
        pass.top_probs[row * top_k_] = std::numeric_limits<float>::quiet_NaN();
  }

  std::string description() const override { return "callback"; }

 private:
  // Returns true if no logit of the row is NaN or +inf. Ignores the logit of the mask token.
  bool is_usable(const float* logits) const {
    bool is_usable = true;
    for (const auto& [first, last] :
         {std::pair{0, mask_token_id_}, std::pair{mask_token_id_ + 1, vocab_size_}})
      for (int32_t token = first; token < last; ++token)
        is_usable &= logits[token] < std::numeric_limits<float>::infinity();
    return is_usable;
  }

  const dlm_pass_fn function_;
  void* const user_;
  const int32_t vocab_size_, mask_token_id_, top_k_;
};

}  // namespace

std::unique_ptr<HostEngine> make_callback(dlm_pass_fn run, void* user, const Denoiser& denoiser) {
  if (run == nullptr) fail(DLM_INVALID_ARGUMENT, "the pass callback is NULL");
  return std::make_unique<Callback>(run, user, denoiser);
}

}  // namespace dlm
