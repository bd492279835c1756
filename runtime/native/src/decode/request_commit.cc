// How a Request commits the tokens that the proposer chose after a pass.
#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "base/error.h"
#include "decode/request.h"

namespace dlm {
namespace {

// Returns ln p as a finite number. A constraint may force a token whose probability rounds to 0.
// The logarithm of this token must be finite too, because JSON cannot represent infinity.
double finite_log(double prob) {
  return std::log(std::max(prob, std::numeric_limits<double>::denorm_min()));
}

// Returns ln(best) - ln(prob). `best` is the probability of the most likely token, and `prob` the
// probability of a given token. If a probability underflows to 0, the function uses the smallest
// positive double instead. So the result is finite, at most 745 nats.
double log_prob_loss(double best, double prob) {
  return std::max(0.0, finite_log(best) - finite_log(prob));
}

}  // namespace

void Request::check_prediction(size_t row, int32_t token, double prob, double score) const {
  if (token < 0 || token >= denoiser_.vocab_size || token == denoiser_.mask_token_id)
    fail(DLM_ENGINE_FAILED, "the denoiser predicted the invalid token %d at position %d", token,
         positions_[row]);
  if (!std::isfinite(prob) || !std::isfinite(score))
    fail(DLM_ENGINE_FAILED,
         "the denoiser's prediction at position %d is not finite: the weights are damaged or "
         "overflow at this precision",
         positions_[row]);
}

double Request::reported(const Proposals& proposals, size_t row) const {
  const double score = proposals.scores[row];
  const bool is_edit = undecided_[positions_[row]] == 0;
  return policy_.score == Score::entropy && !is_edit ? score : fraction_of(score);
}

void Request::propose(const Turn& turn, const Predictions& predictions, Proposals& proposals) {
  // These checks must come first, because propose() uses the token ids as indices into the logits.
  for (size_t row = 0; row < positions_.size(); ++row) {
    const size_t best = row * denoiser_.top_k;
    check_prediction(row, predictions.tokens[best], predictions.probs[best], 0);
  }
  proposals.resize(positions_.size());
  proposer_->propose(turn, predictions, proposals);
  for (size_t row = 0; row < positions_.size(); ++row)
    check_prediction(row, proposals.tokens[row], proposals.probs[row], reported(proposals, row));
  if (is_constrained_) find_losses(predictions, proposals);
  // A shifted denoiser predicts the first position of a block in the row just before the block.
  // With a cache for full attention, only the opening pass (the first pass of the block) computes
  // this row. So the first position must commit in the opening pass.
  const bool is_opening = !stage().is_repeated() && is_full(policy_.cache);
  if (is_opening && denoiser_.shift == 1 && positions_[0] == stage().block.first) {
    // The first position gets the highest score, so that it commits. If it stayed undecided, the
    // next pass would have to score row -1, which does not exist.
    const double best = *std::max_element(proposals.scores.begin(), proposals.scores.end());
    proposals.scores[0] = std::max(best, policy_.score == Score::entropy ? 0.0 : score_of(1));
  }
}

void Request::find_losses(const Predictions& predictions, Proposals& proposals) const {
  for (size_t row = 0; row < positions_.size(); ++row)
    proposals.losses[row] =
        log_prob_loss(predictions.probs[row * denoiser_.top_k], proposals.probs[row]);
}

int32_t Request::planned(int32_t left) const {
  const int32_t steps = stage().steps;
  if (policy_.commit == Commit::timestep)
    return timestep_count(left, step_, steps, policy_.timestep_eps);
  switch (policy_.schedule) {
    case Schedule::masked:
      return even_count(masked_, step_, steps);
    case Schedule::block:
      return even_count(stage().decided.tokens(), step_, steps);
    case Schedule::floor:
      break;
  }
  return floor_count(masked_, left, steps);
}

void Request::commit(const Predictions& predictions, const Proposals& proposals) {
  if (is_ahead()) {
    choose_ahead(policy_, proposals.scores, started_blocks(), order_);
  } else {
    choose_commits(proposals);
  }
  if (policy_.commit == Commit::longest_prefix) cut_at_end(proposals);
  note_guesses(proposals);
  take(predictions, proposals, order_);
  if (denoiser_.resizes()) resize();
  if (!denoiser_.has_shifted_drafts) return;
  const auto length = static_cast<int32_t>(canvas_.size());
  const int32_t next = stage().block.first + committed_;
  if (next < length) plan_prefix(plan_, policy_, stage().block.first - 1, next, length);
}

// If the policy stops at end tokens, no position after an end token commits.
void Request::cut_at_end(const Proposals& proposals) {
  if (policy_.stop == Stop::none) return;
  const auto is_end = [&](int32_t row) { return denoiser_.is_end(proposals.tokens[row]); };
  const auto found = std::find_if(order_.begin(), order_.end(), is_end);
  if (found != order_.end()) order_.erase(found + 1, order_.end());
}

// Chooses the rows that commit, and the rows whose decided tokens are replaced (LLaDA2.1).
void Request::choose_commits(const Proposals& proposals) {
  std::vector<int32_t> rows;
  std::vector<double> scores;
  for (size_t row = 0; row < positions_.size(); ++row) {
    if (undecided_[positions_[row]] == 0) continue;
    rows.push_back(static_cast<int32_t>(row));
    scores.push_back(proposals.scores[row]);
  }
  order_.clear();
  if (const auto left = static_cast<int32_t>(rows.size()); left > 0)
    order_.resize(static_cast<size_t>(choose(policy_, scores, planned(left), order_)));
  for (int32_t& row : order_) row = rows[row];
  for (size_t row = 0; row < positions_.size(); ++row)
    if (undecided_[positions_[row]] == 0 && proposals.tokens[row] != canvas_[positions_[row]] &&
        proposals.scores[row] > score_of(policy_.edit_threshold))
      order_.push_back(static_cast<int32_t>(row));
}

void Request::note_guesses(const Proposals& proposals) {
  for (size_t row = 0; row < positions_.size(); ++row) {
    if (undecided_[positions_[row]] == 0) continue;
    guess_[positions_[row]] = proposals.tokens[row];
    score_[positions_[row]] = static_cast<float>(reported(proposals, row));
  }
}

// Writes the drafted tokens to the canvas. Their positions stay undecided until verify().
void Request::draft(const Proposals& proposals) {
  note_guesses(proposals);
  for (size_t row = 0; row < positions_.size(); ++row)
    canvas_[positions_[row]] = proposals.tokens[row];
}

// Decides positions from left to right. The last decided position is the first position whose
// drafted token differs from the proposed token. If the policy stops at end tokens, an earlier end
// token is the last decided position instead. The draft does not include the last position of a
// block. Then plans the next block, and drafts it with the last rows of the pass if all drafted
// tokens were right.
void Request::verify(const Predictions& predictions, Proposals& proposals,
                     const std::vector<int32_t>& drafted) {
  note_guesses(proposals);
  order_.clear();
  for (size_t row = 0; row < positions_.size(); ++row) {
    const int32_t token = proposals.tokens[row];
    order_.push_back(static_cast<int32_t>(row));
    if (canvas_[positions_[row]] != token) break;
    if (policy_.stop != Stop::none && denoiser_.is_end(token)) break;
  }
  for (int32_t i = positions_.front(); i < stage().rows.last; ++i)
    canvas_[i] = denoiser_.mask_token_id;
  canvas_[positions_.back()] = denoiser_.mask_token_id;
  take(predictions, proposals, order_);
  const bool is_right = order_.size() == positions_.size();
  const int32_t next = positions_[order_.size() - 1] + 1;
  const auto length = static_cast<int32_t>(canvas_.size());
  if (next == length) return;
  const size_t drafts = is_right ? drafted.size() : 0;
  plan_verified(plan_, policy_, denoiser_, next, length, static_cast<int32_t>(drafts));
  if (drafts == 0) return;
  const Predictions rest = predictions.from(positions_.size(), denoiser_);
  positions_ = drafted;
  propose(turn(plan_.back().block, false), rest, proposals);
  draft(proposals);
}

void Request::take(const Predictions& predictions, const Proposals& proposals,
                   const std::vector<int32_t>& chosen) {
  for (const int32_t row : chosen) {
    keep_alternatives(predictions, static_cast<size_t>(row));
    take(positions_[row], proposals.tokens[row], finite_log(proposals.probs[row]),
         proposals.losses[row]);
  }
  committed_ = static_cast<int32_t>(chosen.size());
}

void Request::take(int32_t position, int32_t token, double log_prob, double loss) {
  canvas_[position] = token;
  if (guidance() > 0) unconditional_[position] = token;
  undecided_[position] = 0;
  log_probs_[position] = static_cast<float>(log_prob);
  if (is_constrained_) losses_[position] = loss;
  guess_[position] = -1;
  score_[position] = 0;
  proposer_->note(position, token);
}

void Request::keep_alternatives(const Predictions& predictions, size_t row) {
  const size_t best = row * denoiser_.top_k, first = positions_[row] * top_count_;
  int32_t* const tokens = top_tokens_.data() + first;
  const float* logits = nullptr;
  size_t count = top_count_;
  if (count <= static_cast<size_t>(denoiser_.top_k)) {
    std::copy_n(predictions.tokens + best, count, tokens);
  } else {
    logits = predictions.logits + row * denoiser_.vocab_size;
    count = rank_tokens(denoiser_, logits, count, tokens);
  }
  for (size_t at = 0; at < count; ++at) {
    const double prob = logits == nullptr
                            ? predictions.probs[best + at]
                            : prob_behind(behind_of(tokens[at], logits, predictions.tokens[best]),
                                          predictions.probs[best]);
    check_prediction(row, tokens[at], prob, 0);
    top_log_probs_[first + at] = static_cast<float>(finite_log(prob));
  }
}

// Decides the positions that have only one legal token. With remask "noise", a block is decided
// only as a whole, and write_noise() writes these tokens. If the plan depends on the tokens,
// positions are only decided from left to right.
void Request::scaffold(Range range, const Predictions* predictions) {
  if (renoises() || plans_late()) return;
  certain_.clear();
  proposer_->scaffold(canvas_, undecided_, range, certain_);
  for (const Certain& certain : certain_)
    take(certain.position, certain.token, 0, loss_of(certain, predictions));
  committed_ += static_cast<int32_t>(certain_.size());
}

// Returns the loss of a token that was decided without a pass. The loss is computed from the
// predictions of the last pass. If the last pass did not score the position, the loss is 0.
double Request::loss_of(const Certain& certain, const Predictions* predictions) const {
  const auto found = std::lower_bound(positions_.begin(), positions_.end(), certain.position);
  if (!is_constrained_ || predictions == nullptr || predictions->logits == nullptr) return 0;
  if (found == positions_.end() || *found != certain.position) return 0;
  const size_t row = found - positions_.begin(), best = row * denoiser_.top_k;
  const float* const logits = predictions->logits + row * denoiser_.vocab_size;
  const float prob = predictions->probs[best];
  return log_prob_loss(
      prob, prob_behind(behind_of(certain.token, logits, predictions->tokens[best]), prob));
}

}  // namespace dlm
