#include "decode/request.h"

#include <algorithm>
#include <utility>

#include "base/error.h"

namespace dlm {

Request::Request(const Denoiser& denoiser, const Engine& engine, const Policy& policy,
                 std::vector<int32_t> canvas, std::vector<uint8_t> undecided, int32_t steps,
                 std::unique_ptr<Proposer> proposer, int32_t top_log_probs, int32_t prefix_group,
                 int32_t start_length)
    : denoiser_(denoiser),
      engine_(engine),
      policy_(suit_policy(policy, denoiser)),
      steps_(steps),
      longest_(static_cast<int32_t>(canvas.size())),
      canvas_(std::move(canvas)),
      undecided_(std::move(undecided)),
      is_constrained_(proposer != nullptr),
      proposer_(is_constrained_ ? std::move(proposer) : make_proposer(denoiser, policy_)),
      top_count_(static_cast<size_t>(top_log_probs)),
      prefix_group_(prefix_group) {
  if (policy_.cache != Cache::none && !denoiser_.has_cache)
    fail(DLM_UNSUPPORTED, "policy: this denoiser has no key/value cache: use cache = \"none\"");
  if (guidance() > 0 && engine.max_batch() < 2)
    fail(DLM_UNSUPPORTED,
         "policy: cfg_scale = %.10g needs two canvases per pass, one without the prompt, but the "
         "engine takes one: use cfg_scale = 0, or open the bundle with engine \"onnxruntime\"",
         guidance());
  // The authors' limit, so that a request ends even if its denoiser expands and deletes forever.
  expansions_left_ = 2 * static_cast<int32_t>(undecided_.end() -
                                              std::find(undecided_.begin(), undecided_.end(), 1));
  if (start_length > 0 && start_length < longest_) {
    // The largest passes are those of the last block that the canvas may get, or of the longest
    // canvas.
    const std::vector<uint8_t> undecided = std::exchange(undecided_, {});
    const auto open = static_cast<int32_t>(std::count(undecided.begin(), undecided.end(), 1));
    undecided_.assign(undecided.size(), 0);
    std::fill(undecided_.end() -
                  (denoiser.resizes() ? open : std::min(growth(), longest_ - start_length)),
              undecided_.end(), 1);
    plan_ = plan_passes(undecided_, policy_, denoiser_, 0, engine);
    check_limits();
    canvas_.resize(start_length);
    undecided_.assign(undecided.begin(), undecided.begin() + start_length);
  }
  given_ = static_cast<int32_t>(std::count(undecided_.begin(), undecided_.end(), 0));
  if (const auto start = std::find(undecided_.begin(), undecided_.end(), 1);
      rewrites() && std::find(start, undecided_.end(), 0) != undecided_.end())
    fail(DLM_UNSUPPORTED,
         "policy: remask = \"rewrite\" moves tokens, but position %d is to be filled before tokens "
         "that are given: give only tokens before the new ones",
         static_cast<int32_t>(start - undecided_.begin()));
  reserve();
  for (const uint8_t is_undecided : undecided_) is_given_.push_back(is_undecided == 0);
  if (guidance() > 0) {
    unconditional_ = canvas_;
    for (size_t at = 0; at < canvas_.size(); ++at)
      if (is_given_[at]) unconditional_[at] = denoiser_.mask_token_id;
  }
  plan_ = plan_passes(undecided_, policy_, denoiser_, steps, engine);
  if (!plan_.empty() && plan_.front().block.first == 0) decided_at_ = -1;  // there is no prompt
  // So layers with a window never have more new rows, however long the prompt is.
  if (window_of(denoiser_.cache) > 0) split_prefill(kPassTokens, 0, {});
  check_limits();
  extend(canvas_.size());
  scaffold({0, static_cast<int32_t>(canvas_.size())});
  if (!plan_.empty()) masked_ = count_undecided(plan_.front().decided);
  settle();
}

void Request::check_limits() const {
  const auto length = static_cast<int32_t>(canvas_.size());
  const bool is_prefix = policy_.cache == Cache::prefix, is_full = dlm::is_full(policy_.cache);
  std::vector<Stage> plan = plan_;
  if (!plan.empty() && plan.back().block.last < length) plan_largest(plan, plan.back().block.last);
  if (is_ahead() && has_cache()) {
    // choose_rows() changes the rows of each pass. A pass may start at any block.
    const bool is_causal = denoiser_.visible_block > 0;
    if (is_causal && !plan.empty()) {  // only the first pass computes the prompt
      plan.resize(1);
      plan.front().rows = {0, plan.front().block.last};
      plan.front().cached = 0;
    }
    for (const Stage& stage : plan_) {
      plan.push_back(stage);
      const int32_t first = std::max(0, stage.block.first - (is_causal ? denoiser_.shift : 0));
      plan.back().rows = {first, length};
      plan.back().cached = first;
    }
  }
  for (const Stage& stage : plan) {
    const int32_t tokens = stage.rows.tokens();
    const bool is_opening = is_full && !stage.is_repeated();
    int32_t rows = count_undecided(stage.decided) + stage.drafted.tokens();
    // The opening pass of a block (see pass_plan.h) decides at least one position. So each later
    // pass of the block scores at least one position fewer.
    if (is_full && stage.is_repeated()) --rows;
    if (is_ahead()) rows = count_undecided({stage.decided.first, stage.rows.last});
    if (is_full && rows == 0) continue;
    if (may_edit(stage)) rows = count_undecided(stage.block);
    if (std::max(1, rows) <= engine_.max_rows(tokens, stage.cached)) continue;
    const char* const advice =
        policy_.cache == Cache::block || policy_.cache == Cache::block_dual
            ? "choose a smaller block_length, unless this is the smallest"
        : policy_.cache == Cache::none || (is_opening && tokens == length)
            ? "choose a shorter canvas or a smaller block_length"
        : is_opening ? (is_prefix ? "choose cache = \"dual\", or refresh = 0"
                                  : "choose a smaller refresh or block_length, or refresh = 0")
        : is_prefix  ? "choose cache = \"dual\""
                     : "choose a smaller block_length";
    fail(DLM_INVALID_ARGUMENT,
         "this request needs a pass of %d tokens over %d cached ones that scores %d rows, but the "
         "engine takes %s: %s, or build the engine again with a larger --canvas or --block",
         tokens, stage.cached, rows, engine_.limits().c_str(), advice);
  }
}

size_t Request::find_positions() {
  if (renoises() && stage().is_repeated() && step_ == 0) write_noise(0);
  const Range drafted = stage().drafted;
  if (!denoiser_.has_mask_token() && drafted.tokens() > 0)
    write_random({stage().draft_rows(), stage().rows.last}, 0);
  const Range open = window();
  const bool may_edit = this->may_edit(stage()) && (is_editing_ || count_undecided(open) > 0);
  const Range range = may_edit ? stage().block : open;
  positions_.clear();
  for (int32_t i = range.first; i < range.last; ++i)
    if (undecided_[i] != 0 ? i >= open.first && i < open.last : may_edit && !is_given_[i])
      positions_.push_back(i);
  for (int32_t i = drafted.first; i < drafted.last; ++i) positions_.push_back(i);
  return positions_.size();
}

Needs Request::needs() const {
  if (positions_.empty()) return {};
  Needs found = proposer_->needs(turn());
  found.conditioning = denoiser_.passed_conditioning() > 0;
  // If the caller wants at most top_k alternatives for each position, the candidates are enough,
  // and the pass need not return logits.
  found.logits = found.logits || top_count_ > static_cast<size_t>(denoiser_.top_k);
  found.draws = found.draws || guidance() > 0;
  if (rules_out_expand()) found.logits = true, found.entropy = false;  // see predictions_of
  if (rewrites() &&
      (policy_.edit_passes == 0 || must_end_rewriting() || seen_.count(block_tokens()) > 0))
    found.logits = true;  // see propose_other
  if (found.draws && (found.logits || !engine_.draws())) found.draws = false, found.logits = true;
  if (guidance() > 0) found.entropy = found.draws;  // the host computes it from the logits
  return found;
}

void Request::set_draws(std::vector<DrawRow>& rows, size_t first, size_t apart) const {
  if (positions_.empty()) return;
  proposer_->set_draws(turn(), rows.data() + first);
  for (size_t row = first; guidance() > 0 && row < first + positions_.size(); ++row) {
    rows[row].is_guided = true;
    rows[row].guidance = guidance();
    rows[row].unconditional = static_cast<int32_t>(row + apart);
  }
}

void Request::step(const Predictions& predictions, Proposals& proposals) {
  committed_ = 0;
  std::fill(guess_.begin(), guess_.end(), -1);
  std::fill(score_.begin(), score_.end(), 0.0f);
  if (!positions_.empty()) {
    // The positions after those of the stage are drafted only after the others are verified.
    const size_t drafts = stage().drafted.tokens();
    const std::vector<int32_t> drafted(positions_.end() - drafts, positions_.end());
    positions_.resize(positions_.size() - drafts);
    propose(turn(), predictions, proposals);
    if (renoises())
      renoise(predictions, proposals);
    else if (rewrites())
      rewrite(predictions, proposals);
    else if (!verifies())
      commit(predictions, proposals);
    else if (stage().is_draft)
      draft(proposals);
    else
      verify(predictions, proposals, drafted);
  }
  ++nfe_;
  is_made_ = true;
  ++(is_editing_ ? edits_ : step_);
  view_start_ = stage().block.first;
  view_end_ = is_ahead() ? window().last : stage().block.last;
  if (is_ahead() && denoiser_.visible_block == 0) close();
  settle(&predictions);
}

// Moves to the next stage that needs a pass. `predictions` are the predictions of the last pass, or
// NULL if there was no pass yet.
void Request::settle(const Predictions* predictions) {
  while (!done()) {
    const Stage& now = stage();
    scaffold(now.block, predictions);
    if (policy_.stop == Stop::early_eos && end_early(now.block)) return;
    const bool is_stored = keeps_rows(now.use);
    const bool is_undecided = count_undecided(now.decided) > 0;
    // If all positions of the block are decided, the request skips the opening pass of the block.
    // With `refresh`, it must not skip this pass, because the opening pass of the next block does
    // not recompute the rows before this block.
    const bool is_idle =
        !is_undecided && (is_full(policy_.cache) ? policy_.refresh == 0 : now.rows == now.block);
    const bool is_first = !is_made_ && !is_idle && (is_stored || is_undecided);
    if (is_first || count_undecided(now.awaited) > 0) return is_ahead() ? widen() : void();
    if (now.is_last) {
      is_editing_ = policy_.remask == Remask::edit && edits_ < policy_.edit_passes &&
                    (edits_ == 0 || committed_ > 0);
      if (is_editing_ || end_early(now.block)) return;
      edits_ = 0;
    }
    const Range before = now.decided;
    ++stage_;
    is_made_ = false;
    if (done() && !grow()) return;
    if (stage().decided == before) continue;
    step_ = settled_ = 0;
    seen_.clear(), written_.clear();
    masked_ = count_undecided(stage().decided);
  }
}

}  // namespace dlm
