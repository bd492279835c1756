// How a Request shares passes with other requests.
#include <algorithm>
#include <utility>
#include <vector>

#include "decode/request.h"

namespace dlm {

bool Request::fits(const Request& other) const {
  const auto same = [](const Stage& one, const Stage& two) {
    return one.rows == two.rows && one.use == two.use && one.block == two.block;
  };
  // Later, the canvases would have different lengths.
  if (denoiser_.resizes()) return false;
  if (canvas_.size() != other.canvas_.size() || has_cache() != other.has_cache()) return false;
  // Canvases that grow must keep the same length, so the requests must also grow by the same
  // blocks.
  const auto length = static_cast<int32_t>(canvas_.size());
  const bool grows = longest_ > length || other.longest_ > length;
  if (grows && (longest_ != other.longest_ || growth() != other.growth())) return false;
  if (!has_cache() && !grows) return true;
  // With `reuse`, the last pass of a block also stores the rows of the block. If a faster request
  // ran in lockstep with a slower request, the slower request could make one more pass. This pass
  // would store different rows for the faster request. Then the result of the faster request would
  // depend on the slower request.
  if (policy_.store == Store::reuse || other.policy_.store == Store::reuse) return false;
  // If later passes depend on the request's tokens, the request cannot run in lockstep.
  if (plans_late() || other.plans_late() || is_ahead() || other.is_ahead()) return false;
  return std::equal(plan_.begin(), plan_.end(), other.plan_.begin(), other.plan_.end(), same);
}

void Request::split_prefill(int32_t most_tokens, double most_ms, const PassCost& cost) {
  const int32_t block = denoiser_.visible_block;
  if (!denoiser_.splits_prompts()) return;
  std::vector<Stage> plan;
  for (Stage stage : plan_) {
    const auto fits = [&](int32_t tokens) {
      Stage part = stage;
      part.rows.last = part.rows.first + tokens;
      const PassLoad load = load_of(part, 0);
      return load.tokens <= most_tokens && (most_ms <= 0 || cost.of(load) <= most_ms);
    };
    const bool fills = stage.kind == PassKind::prefill && stage.use == CacheUse::append;
    while (fills && !fits(stage.rows.tokens())) {
      int32_t tokens = block;
      while (fits(tokens + block)) tokens += block;
      // A single pass must compute all positions from the start of the block on.
      const int32_t end = std::min(stage.rows.first + tokens, stage.block.first);
      if (end <= stage.rows.first || end >= stage.rows.last) break;
      Stage part = stage;
      part.rows.last = end;
      part.decided = {stage.block.first, stage.block.first};
      plan.push_back(part);
      stage.rows.first = stage.cached = end;
      --skipped_;
    }
    plan.push_back(stage);
  }
  plan_ = std::move(plan);
  if (!plan_.empty()) masked_ = count_undecided(stage().decided);
}

PassLoad Request::load_of(const Stage& stage, size_t rows) const {
  const double canvases = static_cast<double>(this->canvases()),
               tokens = canvases * stage.rows.tokens();
  return {tokens, canvases * static_cast<double>(rows),
          tokens * (stage.rows.tokens() + stage.cached)};
}

PassLoad Request::usual_load(const PassCost& cost) const {
  PassLoad most;
  const auto add = [&](const Stage& stage) {
    const PassLoad load =
        load_of(stage, may_edit(stage) ? stage.block.tokens()
                                       : stage.decided.tokens() + stage.drafted.tokens());
    if (cost.share(load) > cost.share(most)) most = load;
  };
  for (size_t number = stage_; number < plan_.size(); ++number)
    if (plan_[number].is_repeated()) add(plan_[number]);
  std::vector<Stage> last;
  if (!done()) plan_largest(last, 1);
  for (const Stage& stage : last) add(stage);
  return most;
}

// The largest passes are those of a whole block at the end of the canvas, after a pass that drafted
// or decided a whole block.
void Request::plan_largest(std::vector<Stage>& plan, int32_t from) const {
  const auto length = static_cast<int32_t>(canvas_.size());
  const int64_t block = policy_.block_length, blocks = denoiser_.has_causal_drafts() ? 2 : 1;
  const auto tokens = static_cast<int32_t>(std::min<int64_t>(blocks * block, length - from));
  const int32_t start = length - tokens;
  if (verifies())
    plan_verified(plan, policy_, denoiser_, start, length,
                  static_cast<int32_t>(std::min<int64_t>(block, tokens)) - 1);
  if (denoiser_.has_shifted_drafts)
    plan_prefix(plan, policy_,
                std::max(plan_.front().block.first, start - policy_.block_length) - 1, start,
                length);
}

}  // namespace dlm
