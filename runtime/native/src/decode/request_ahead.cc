// Passes that decide positions of several blocks (D2F, d3LLM).
#include <algorithm>
#include <limits>
#include <vector>

#include "decode/request.h"

namespace dlm {

// Called before a pass over several blocks. If enough positions of the last of these blocks are
// decided, and none of them contains an end token, later passes also decide positions of the next
// block.
void Request::widen() {
  if (last_stage_ < stage_)
    last_stage_ = stage_;
  else if (last_stage_ + 1 < plan_.size() && decided_share(last_stage_) >= policy_.next_block &&
           (policy_.stop == Stop::none || !has_end(plan_[last_stage_].block.last)))
    ++last_stage_;
  if (has_cache()) choose_rows();
}

// Returns the rows of the started blocks that are not finished. The pass must commit a position in
// the first block, and in a block after a block of which the share `force_next` is decided.
std::vector<StartedBlock> Request::started_blocks() const {
  std::vector<StartedBlock> found;
  for (size_t number = stage_; number <= last_stage_; ++number) {
    const bool is_forced = number == stage_ || (policy_.force_next < 1 &&
                                                decided_share(number - 1) >= policy_.force_next);
    const auto row_at = [&](int32_t position) {
      const auto at = std::lower_bound(positions_.begin(), positions_.end(), position);
      return static_cast<int32_t>(at - positions_.begin());
    };
    const Range block = plan_[number].decided;
    const StartedBlock rows{row_at(block.first), row_at(block.last), is_forced};
    if (rows.first < rows.last) found.push_back(rows);
  }
  return found;
}

// Chooses the rows of the next pass if passes decide positions of several blocks and use a cache.
// With block-causal attention, the pass runs all started blocks that are not cached, and stores the
// decided blocks at their start (D2F). A shifted denoiser predicts a position in the row before it,
// so the last row before the first unfinished block is computed in every pass.
void Request::choose_rows() {
  Stage& now = plan_[stage_];
  if (denoiser_.visible_block == 0) return choose_approximate_rows(now);
  const int32_t stored = std::max(0, now.block.first - denoiser_.shift);
  now.rows = {cached_, plan_[last_stage_].block.last};
  now.cached = cached_;
  now.use = stored > cached_ ? CacheUse::append : cached_ > 0 ? CacheUse::read : CacheUse::none;
  now.kind = stored == cached_ ? PassKind::denoise
             : cached_ == 0    ? PassKind::prefill
                               : PassKind::store;
  cached_ = stored;
}

// The same for full attention (d3LLM). The cache contains the prompt and decided blocks. The rows
// of a block are stored `cache_delay` passes after the block was found to be decided. Until then,
// passes run the whole canvas, because the rows of other blocks may still change. Each pass whose
// number is a multiple of `refresh_interval` computes all cached rows again.
void Request::choose_approximate_rows(Stage& now) {
  const auto length = static_cast<int32_t>(canvas_.size());
  const int32_t number = nfe_ + 1;
  int32_t last = cached_;
  bool is_waiting = false;
  // All blocks before the current stage are decided. Given positions between two blocks belong to
  // the earlier block, and positions before the first block are the prompt.
  for (size_t next = 0; next <= stage_; ++next) {
    const int32_t end = plan_[next].block.first;
    if (end <= last) continue;
    if (decided_at_ < 0) decided_at_ = number;
    is_waiting = number - decided_at_ < policy_.cache_delay;
    if (is_waiting) break;
    last = end;
    decided_at_ = -1;
  }
  const int32_t first = cached_;
  const bool is_storing = last > first;
  const bool is_refreshing =
      is_waiting || (policy_.refresh_interval > 0 && number % policy_.refresh_interval == 0);
  cached_ = last;
  now.rows = {has_rows_ && (is_storing || !is_refreshing) ? first : 0, length};
  now.cached = now.rows.first;
  if (is_storing || (has_rows_ && is_refreshing)) {
    now.use = now.cached > 0 ? CacheUse::refresh : CacheUse::write;
    now.kind = PassKind::prefill;
    has_rows_ = true;
  } else {
    now.use = now.cached > 0 ? CacheUse::read : CacheUse::none;
    now.kind = PassKind::denoise;
  }
}

// Called after a pass over several blocks with full attention. If the policy stops at end tokens,
// all positions after the first generated end token become end tokens, as in d3LLM's code.
void Request::close() {
  if (policy_.stop == Stop::none) return;
  bool is_ended = false;
  for (size_t at = 0; at < canvas_.size(); ++at) {
    if (is_given_[at]) continue;
    if (is_ended)
      take(static_cast<int32_t>(at), denoiser_.eos_token_ids.front(),
           std::numeric_limits<double>::quiet_NaN());
    is_ended = is_ended || (undecided_[at] == 0 && denoiser_.is_end(canvas_[at]));
  }
}

}  // namespace dlm
