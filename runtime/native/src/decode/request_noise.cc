// Blocks that start from random tokens, and self-conditioning (DiffusionGemma).
#include <algorithm>
#include <numeric>

#include "base/random.h"
#include "decode/request.h"
#include "engines/draws.h"

namespace dlm {

void Request::write_random(Range range, int32_t step) {
  for (int32_t i = range.first; i < range.last; ++i)
    if (undecided_[i] != 0)
      canvas_[i] = random_token(policy_.seed, static_cast<uint32_t>(step), static_cast<uint32_t>(i),
                                denoiser_.vocab_size, denoiser_.mask_token_id);
}

void Request::write_noise(int32_t step) {
  const Range range = stage().decided;
  write_random(range, step);
  certain_.clear();
  proposer_->scaffold(canvas_, undecided_, range, certain_);
  for (const Certain& certain : certain_) canvas_[certain.position] = certain.token;
}

// The chosen positions get their proposed tokens, and all others get new random tokens
// (DiffusionGemma). The result of the block is the most likely text of its last pass.
void Request::renoise(const Predictions& predictions, Proposals& proposals) {
  order_.resize(static_cast<size_t>(choose(policy_, proposals.scores, 0, order_)));
  best_before_.swap(best_);
  best_.resize(positions_.size());
  for (size_t row = 0; row < positions_.size(); ++row)
    best_[row] = predictions.tokens[row * denoiser_.top_k];
  proposer_->find_best(turn(), predictions, best_);
  const bool is_last = is_stable(proposals) || step_ + 1 >= stage().steps;
  if (!is_last) {
    write_noise(step_ + 1);
    for (const int32_t row : order_) canvas_[positions_[row]] = proposals.tokens[row];
  }
  for (size_t row = 0; row < positions_.size(); ++row) {
    const size_t best = row * denoiser_.top_k;
    const int32_t token = proposals.tokens[row] = best_[row], likeliest = predictions.tokens[best];
    const float prob = predictions.probs[best];
    if (token == likeliest) {
      proposals.probs[row] = prob;
      continue;
    }
    const float* const logits = predictions.logits + row * denoiser_.vocab_size;
    proposals.probs[row] = prob_behind(behind_of(token, logits, likeliest), prob);
  }
  if (is_constrained_) find_losses(predictions, proposals);
  note_guesses(proposals);
  if (is_last) {
    order_.resize(positions_.size());
    std::iota(order_.begin(), order_.end(), 0);
    take(predictions, proposals, order_);
    conditioning_.clear();
    has_conditioning_ = false;
    return;
  }
  // A denoiser with self-conditioning has no mask token. So all positions after the given tokens
  // are undecided, and positions_ are all rows of the pass.
  has_conditioning_ = denoiser_.conditioning_size > 0;
  if (predictions.next_conditioning != nullptr)
    conditioning_.assign(
        predictions.next_conditioning,
        predictions.next_conditioning + positions_.size() * denoiser_.conditioning_size);
}

bool Request::is_stable(const Proposals& proposals) {
  if (policy_.stable_entropy == 0) return false;
  stable_ = step_ > 0 && best_ == best_before_ ? stable_ + 1 : 0;
  double entropy = 0;
  for (const double score : proposals.scores) entropy -= score;
  return stable_ >= policy_.stable_passes &&
         entropy / static_cast<double>(positions_.size()) < policy_.stable_entropy;
}

float Request::graph_temperature() const {
  return static_cast<float>(std::clamp(temperature(), 1e-30, 1e30));
}

}  // namespace dlm
