// The canvas of a Request: how it grows, gets end tokens, and becomes a result.
#include <algorithm>
#include <limits>
#include <numeric>
#include <vector>

#include "decode/request.h"

namespace dlm {

void Request::extend(size_t length) {
  constexpr float kNone = std::numeric_limits<float>::quiet_NaN();
  guess_.resize(length, -1);
  score_.resize(length, 0.0f);
  log_probs_.resize(length, kNone);
  top_tokens_.resize(length * top_count_, -1);
  top_log_probs_.resize(length * top_count_, kNone);
  if (is_constrained_) losses_.resize(length, 0);
  if (guidance() > 0) unconditional_.resize(length, denoiser_.mask_token_id);
  is_given_.resize(length, false);
  is_added_.resize(length, 0);
  undecided_.resize(length, 1);
  canvas_.resize(length, denoiser_.mask_token_id);
}

bool Request::grow() {
  const auto length = static_cast<int32_t>(canvas_.size());
  if (length == longest_ || denoiser_.resizes() || has_end(canvas_.size())) return false;
  if (is_reserved_) {
    canvas_.back() = denoiser_.mask_token_id;
    undecided_.back() = 1;
    is_reserved_ = is_given_.back() = false;
  }
  extend(length + std::min(growth(), longest_ - length));
  reserve();
  is_given_.back() = undecided_.back() == 0;
  const std::vector<Stage> added =
      plan_passes(undecided_, policy_, denoiser_, steps_ > 0 ? plan_.back().steps : 0, engine_);
  plan_.insert(plan_.end(), added.begin(), added.end());
  has_rows_ = false;  // a cache holds the rows of one length, so the next pass writes all rows
  return true;
}

void Request::resize() {
  std::vector<int32_t> committed;
  for (const int32_t row : order_) committed.push_back(positions_[row]);
  // From right to left, so that the positions that are still to come stay valid.
  std::sort(committed.rbegin(), committed.rend());
  auto room = longest_ - static_cast<int32_t>(canvas_.size());
  for (const int32_t at : committed) room += canvas_[at] == denoiser_.delete_token_id ? 1 : 0;
  for (const int32_t at : committed) {
    const int32_t token = canvas_[at];
    if (token == denoiser_.delete_token_id) replace(at, 0);
    if (token != denoiser_.expand_token_id) continue;
    const int32_t added = room > 0 && expansions_left_ > 0 ? 1 : 0;
    room -= added, expansions_left_ -= added;
    replace(at, 1 + added);
  }
}

void Request::replace(int32_t at, int32_t count) {
  splice(at, 1, count);
  for (Stage& stage : plan_)  // the whole canvas is one block
    stage.rows.last = stage.decided.last = stage.awaited.last = stage.block.last =
        static_cast<int32_t>(canvas_.size());
}

void Request::splice(int32_t at, int32_t removed, int32_t added) {
  const auto change = [&](auto& list, auto value, size_t width = 1) {
    const auto first = list.begin() + static_cast<std::ptrdiff_t>(at * width);
    list.insert(list.erase(first, first + static_cast<std::ptrdiff_t>(removed * width)),
                added * width, value);
  };
  constexpr float kNone = std::numeric_limits<float>::quiet_NaN();
  change(canvas_, denoiser_.mask_token_id);
  if (guidance() > 0) change(unconditional_, denoiser_.mask_token_id);
  change(undecided_, uint8_t{1});
  change(is_given_, false);
  change(guess_, -1);
  change(score_, 0.0f);
  change(log_probs_, kNone);
  change(top_tokens_, -1, top_count_);
  change(top_log_probs_, kNone, top_count_);
  change(is_added_, uint8_t{1});
}

bool Request::has_end(size_t length) const {
  for (size_t at = 0; at < length; ++at)
    if (!is_given_[at] && denoiser_.is_end(canvas_[at])) return true;
  return false;
}

void Request::reserve() {
  const bool can_end = !denoiser_.eos_token_ids.empty() && !is_constrained_;
  const auto length = static_cast<int32_t>(canvas_.size());
  if (policy_.reserve == Reserve::none || !can_end || length == 0 || undecided_.back() == 0 ||
      count_undecided({0, length}) == 1)
    return;
  canvas_.back() = denoiser_.eos_token_ids.front();
  undecided_.back() = 0;
  is_reserved_ = true;
}

int32_t Request::count_undecided(Range range) const {
  return static_cast<int32_t>(
      std::count(undecided_.begin() + range.first, undecided_.begin() + range.last, 1));
}

void Request::end(int32_t why) {
  if (done()) return;
  if (is_constrained_) extend(longest_);  // the rest of the text may need this room
  std::vector<int32_t> guess = guess_;
  proposer_->complete(canvas_, undecided_, guess);
  for (size_t at = canvas_.size(); at-- > 0;) {
    if (undecided_[at] == 0) continue;
    if (guess[at] == denoiser_.expand_token_id || guess[at] == denoiser_.split_token_id ||
        guess[at] == denoiser_.delete_token_id)
      guess[at] = -1;
    if (denoiser_.resizes() && guess[at] < 0) {
      replace(static_cast<int32_t>(at), 0);
      continue;
    }
    // If the canvas contains a random token or a drafted token at this position, this code replaces
    // the token.
    canvas_[at] = guess[at] >= 0                    ? guess[at]
                  : denoiser_.eos_token_ids.empty() ? denoiser_.mask_token_id
                                                    : denoiser_.eos_token_ids.front();
  }
  finish_ = why;
  stage_ = plan_.size();
}

void Request::drop() noexcept {
  if (!done()) finish_ = DLM_FINISH_CANCELLED, stage_ = plan_.size();
}

dlm_result Request::result() const {
  dlm_result found{};
  found.tokens = canvas_.data();
  found.log_probs = log_probs_.data();
  found.top_tokens = top_tokens_.data();
  found.top_log_probs = top_log_probs_.data();
  found.top_count = top_count_;
  found.undecided = undecided_.data();
  found.length = canvas_.size();
  found.prompt_tokens = given_;
  found.constraint_log_prob_loss = std::accumulate(losses_.begin(), losses_.end(), 0.0);
  if (const std::vector<double>* const probs = proposer_->option_probs(); probs != nullptr) {
    found.option_probs = probs->data();
    found.option_count = probs->size();
  }
  bool is_ended = false;
  for (size_t at = 0; at < canvas_.size(); ++at) {
    is_ended = is_ended || (!is_given_[at] && denoiser_.is_end(canvas_[at]));
    found.completion_tokens += !is_given_[at] && !is_ended;
  }
  found.finish = finish_;
  if (finish_ == DLM_FINISH_NONE)
    found.finish = is_ended                ? DLM_FINISH_STOP
                   : proposer_->is_whole() ? DLM_FINISH_CONSTRAINT
                                           : DLM_FINISH_LENGTH;
  return found;
}

// Ends the request if the policy stops at end tokens, and the block contains a generated end token
// and no undecided position before it. In this case, all undecided positions become end tokens.
// Returns true if the request has ended.
bool Request::end_early(Range block) {
  if (policy_.stop == Stop::none) return false;
  for (int32_t i = block.first; i < block.last && undecided_[i] == 0; ++i) {
    if (is_given_[i] || !denoiser_.is_end(canvas_[i])) continue;
    for (size_t later = 0; later < canvas_.size(); ++later)
      if (undecided_[later] != 0)
        take(static_cast<int32_t>(later), denoiser_.eos_token_ids.front(),
             std::numeric_limits<double>::quiet_NaN());
    stage_ = plan_.size();
    return true;
  }
  return false;
}

dlm_step Request::view() const {
  dlm_step step{};
  step.struct_size = sizeof step;
  step.canvas = canvas_.data();
  step.guess = guess_.data();
  step.score = score_.data();
  step.undecided = undecided_.data();
  step.length = static_cast<int32_t>(canvas_.size());
  step.block_start = view_start_;
  step.block_end = view_end_;
  step.nfe = nfe_;
  step.committed = committed_;
  step.done = done() ? 1 : 0;
  step.text = "";
  step.prompt_tokens = given_;
  return step;
}

}  // namespace dlm
