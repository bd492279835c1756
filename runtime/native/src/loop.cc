#include "loop.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <numeric>

#include "error.h"
#include "random.h"

namespace dlm {
namespace {

class Stopwatch {
 public:
  explicit Stopwatch(double& seconds) : seconds_(seconds) {}
  ~Stopwatch() { seconds_ += std::chrono::duration<double>(std::chrono::steady_clock::now() - start_).count(); }
  Stopwatch(const Stopwatch&) = delete;
  Stopwatch& operator=(const Stopwatch&) = delete;

 private:
  double& seconds_;
  std::chrono::steady_clock::time_point start_ = std::chrono::steady_clock::now();
};

}  // namespace

dlm_pass prepare_pass(const std::vector<int32_t>& canvas, int32_t first, int32_t last, Buffers& buffers) {
  buffers.input_ids.assign(canvas.begin() + first, canvas.begin() + last);
  buffers.position_ids.resize(static_cast<size_t>(last - first));
  for (int32_t i = first; i < last; ++i) buffers.position_ids[static_cast<size_t>(i - first)] = i;
  dlm_pass pass{};
  pass.tokens = last - first;
  pass.input_ids = buffers.input_ids.data();
  pass.position_ids = buffers.position_ids.data();
  return pass;
}

void prepare_scores(const Denoiser& denoiser, dlm_pass& pass, Buffers& buffers) {
  const size_t candidates = buffers.score_rows.size() * static_cast<size_t>(denoiser.top_k);
  buffers.top_tokens.resize(candidates);
  buffers.top_probs.resize(candidates);
  pass.rows = static_cast<int32_t>(buffers.score_rows.size());
  pass.score_rows = buffers.score_rows.data();
  pass.top_tokens = buffers.top_tokens.data();
  pass.top_probs = buffers.top_probs.data();
}

void time_passes(const Denoiser& denoiser, const Engine& engine, Context& context, Buffers& buffers, int32_t tokens,
                 int32_t cached, int32_t rows, double* seconds, size_t repeats) {
  const int32_t longest = denoiser.max_canvas_length;
  if (tokens < 1 || cached < 0 || rows < 1 || rows > tokens || tokens > longest || cached > longest - tokens)
    fail(DLM_INVALID_ARGUMENT,
         "a pass of %d tokens over %d cached ones that scores %d rows: tokens must be 1 or more, with the cached ones at most %d, "
         "and rows in 1..tokens",
         tokens, cached, rows, longest);
  if (cached > 0 && !denoiser.has_cache) fail(DLM_UNSUPPORTED, "this denoiser keeps no keys and values: cached must be 0");
  const int32_t length = cached + tokens;
  if (rows > engine.max_rows(tokens, cached) || (cached > 0 && engine.max_rows(length, 0) < 1))
    fail(DLM_INVALID_ARGUMENT,
         "a pass of %d tokens over %d cached ones that scores %d rows, after a full pass of %d tokens, but the engine takes %s",
         tokens, cached, rows, length, engine.limits().c_str());
  if (repeats == 0) return;
  std::vector<int32_t> canvas(static_cast<size_t>(length));
  for (int32_t i = 0; i < length; ++i)
    canvas[static_cast<size_t>(i)] = i >= cached && i < cached + rows ? denoiser.mask_token_id : i % denoiser.vocab_size;
  if (cached > 0) {
    dlm_pass full = prepare_pass(canvas, 0, length, buffers);
    buffers.score_rows.assign(1, 0);
    prepare_scores(denoiser, full, buffers);
    context.run(full, CacheUse::write);
    context.keep_outside(cached, length, length);
  }
  dlm_pass pass = prepare_pass(canvas, cached, length, buffers);
  pass.cached = cached;
  buffers.score_rows.resize(static_cast<size_t>(rows));
  std::iota(buffers.score_rows.begin(), buffers.score_rows.end(), 0);
  prepare_scores(denoiser, pass, buffers);
  for (size_t i = 0; i < repeats; ++i) {
    seconds[i] = 0;
    const Stopwatch timer(seconds[i]);
    context.run(pass, cached > 0 ? CacheUse::read : CacheUse::none);
  }
}

Request::Request(const Denoiser& denoiser, const Policy& policy, std::vector<int32_t> canvas, int32_t steps)
    : denoiser_(denoiser), policy_(policy), canvas_(std::move(canvas)) {
  if (policy_.cache != Cache::none && !denoiser_.has_cache)
    fail(DLM_UNSUPPORTED, "policy: this denoiser keeps no keys and values: use cache = \"none\"");
  const auto length = static_cast<int32_t>(canvas_.size());
  is_given_.resize(canvas_.size());
  int32_t origin = length;  // blocks are counted from the first position that is not given
  for (int32_t i = length - 1; i >= 0; --i) {
    is_given_[static_cast<size_t>(i)] = canvas_[static_cast<size_t>(i)] != denoiser_.mask_token_id;
    if (!is_given_[static_cast<size_t>(i)]) origin = i;
  }
  const int32_t block_length = policy_.block_length > 0 ? policy_.block_length : std::max(1, length - origin);
  const int32_t count = static_cast<int32_t>((int64_t{length} - origin + block_length - 1) / block_length);
  if (steps > 0 && steps < count)
    fail(DLM_INVALID_ARGUMENT, "steps = %d is fewer than the %d blocks of %d tokens: every block takes a step", steps, count,
         block_length);
  for (int32_t number = 0; number < count; ++number) {
    Block block{};
    block.start = origin + number * block_length;
    block.end = static_cast<int32_t>(std::min<int64_t>(int64_t{block.start} + block_length, length));
    for (int32_t i = block.start; i < block.end; ++i) block.masked += is_given_[static_cast<size_t>(i)] ? 0 : 1;
    block.steps = steps > 0                      ? even_count(steps, number, count)
                  : policy_.steps_per_block > 0 ? policy_.steps_per_block
                                                 : block_length;
    if (block.masked > 0) blocks_.push_back(block);
  }
  guess_.assign(canvas_.size(), -1);
  score_.assign(canvas_.size(), 0.0f);
}

Request::Range Request::range(const Block& block, bool is_full) const {
  const auto length = static_cast<int32_t>(canvas_.size());
  if (is_full) return {0, length};
  return {block.start, policy_.cache == Cache::prefix ? length : block.end};
}

void Request::check_limits(const Engine& engine) const {
  const auto length = static_cast<int32_t>(canvas_.size());
  const auto check = [&](int32_t tokens, int32_t rows, const char* advice) {
    const int32_t most = engine.max_rows(tokens, length - tokens);
    if (rows <= most) return;
    fail(DLM_INVALID_ARGUMENT,
         "this request needs a pass of %d tokens over %d cached ones that scores %d rows, but the engine takes %s: %s, or build "
         "the engine again with a larger --canvas or --block",
         tokens, length - tokens, rows, engine.limits().c_str(), advice);
  };
  for (const Block& block : blocks_) {
    check(length, block.masked, "choose a shorter canvas or a smaller block_length");
    if (policy_.cache == Cache::none || block.masked < 2) continue;  // a block of one is done after its full pass
    const Range rest = range(block, false);
    check(rest.last - rest.first, block.masked - 1,
          policy_.cache == Cache::prefix ? "choose cache = \"dual\"" : "choose a smaller block_length");
  }
}

void Request::step(Context& context, Buffers& buffers) {
  if (done()) return;
  const Stopwatch total(stats_.total_s);
  const Block& block = blocks_[block_];
  positions_.clear();
  for (int32_t i = block.start; i < block.end; ++i)
    if (canvas_[static_cast<size_t>(i)] == denoiser_.mask_token_id) positions_.push_back(i);
  const bool is_full = block_step_ == 0 || policy_.cache == Cache::none;
  run_pass(context, buffers, range(block, is_full), is_full);
  {
    const Stopwatch timer(stats_.selection_s);
    score(buffers, is_full);
    commit(buffers);
  }
  ++block_step_;
  view_start_ = block.start;
  view_end_ = block.end;
  if (committed_ == static_cast<int32_t>(positions_.size())) finish_block();
}

void Request::run_pass(Context& context, Buffers& buffers, Range range, bool is_full) {
  const auto length = static_cast<int32_t>(canvas_.size());
  dlm_pass pass = prepare_pass(canvas_, range.first, range.last, buffers);
  pass.cached = length - pass.tokens;
  buffers.score_rows.resize(positions_.size());
  for (size_t i = 0; i < positions_.size(); ++i)
    buffers.score_rows[i] = std::max(positions_[i] - denoiser_.shift, 0) - range.first;
  prepare_scores(denoiser_, pass, buffers);
  buffers.entropy.resize(positions_.size());
  pass.entropy = policy_.needs_entropy() ? buffers.entropy.data() : nullptr;
  const CacheUse use = policy_.cache == Cache::none ? CacheUse::none
                       : is_full                   ? CacheUse::write
                       : pass.cached > 0           ? CacheUse::read
                                                   : CacheUse::none;
  if (use == CacheUse::write) past_is_current_ = false;
  if (use == CacheUse::read && !past_is_current_) {
    const Stopwatch timer(stats_.cache_s);
    context.keep_outside(range.first, range.last, length);
    past_is_current_ = true;
  }
  if (!is_full) {
    const CacheShape cache = denoiser_.cache();
    const uint64_t held = 2 * static_cast<uint64_t>(cache.layers) * (cache.layer_bytes(length) + cache.layer_bytes(pass.cached));
    stats_.cache_bytes = std::max(stats_.cache_bytes, held);
  }
  {
    const Stopwatch timer(use == CacheUse::write ? stats_.prefill_s : stats_.passes_s);
    context.run(pass, use);
  }
  ++stats_.nfe;
}

void Request::score(Buffers& buffers, bool is_full) {
  const auto top_k = static_cast<size_t>(denoiser_.top_k);
  buffers.scores.resize(positions_.size());
  for (size_t i = 0; i < positions_.size(); ++i) {
    const int32_t token = buffers.top_tokens[i * top_k];
    const float best = buffers.top_probs[i * top_k], second = buffers.top_probs[i * top_k + 1];
    if (token < 0 || token >= denoiser_.vocab_size || token == denoiser_.mask_token_id)
      fail(DLM_ENGINE_FAILED, "the denoiser predicted token %d at position %d, outside what it may", token, positions_[i]);
    double& score = buffers.scores[i];
    switch (policy_.score) {
      case Score::confidence:
        score = best;
        break;
      case Score::margin:
        score = best - second;
        break;
      case Score::entropy:
        score = buffers.entropy[i];
        break;
      case Score::random:
        score = random_score(policy_.seed, static_cast<uint32_t>(stats_.nfe - 1), static_cast<uint32_t>(positions_[i]));
        break;
    }
    if (!std::isfinite(best) || !std::isfinite(score))
      fail(DLM_ENGINE_FAILED,
           "the denoiser's prediction at position %d is not finite: weights are damaged, or overflow at this precision",
           positions_[i]);
  }
  // Cached passes of a shifted denoiser lack the row before the block, which predicts its first position: that position
  // is taken as sure in the full pass, so that it commits there.
  const bool is_first_masked = positions_[0] == blocks_[block_].start;
  if (is_full && policy_.cache != Cache::none && denoiser_.shift == 1 && is_first_masked) {
    // Never below another, whatever the graph calls a probability: left masked, it would be scored by row -1.
    const double best = *std::max_element(buffers.scores.begin(), buffers.scores.end());
    buffers.scores[0] = std::max(best, policy_.score == Score::entropy ? 0.0 : 1.0);
  }
}

void Request::commit(Buffers& buffers) {
  const Block& block = blocks_[block_];
  const auto masked = static_cast<int32_t>(positions_.size());
  const int32_t planned = policy_.commit == Commit::timestep
                              ? timestep_count(masked, block_step_, block.steps, policy_.timestep_eps)
                              : even_count(block.masked, block_step_, block.steps);
  committed_ = choose(policy_, buffers.scores, planned, buffers.order);
  std::fill(guess_.begin(), guess_.end(), -1);
  std::fill(score_.begin(), score_.end(), 0.0f);
  for (size_t rank = 0; rank < buffers.order.size(); ++rank) {
    const auto row = static_cast<size_t>(buffers.order[rank]);
    const auto position = static_cast<size_t>(positions_[row]);
    const int32_t token = buffers.top_tokens[row * static_cast<size_t>(denoiser_.top_k)];
    if (rank < static_cast<size_t>(committed_)) {
      canvas_[position] = token;
    } else {
      guess_[position] = token;
      score_[position] = static_cast<float>(buffers.scores[row]);
    }
  }
}

void Request::finish_block() {
  const Block& block = blocks_[block_];
  const auto& eos = denoiser_.eos_token_ids;
  ++block_;
  block_step_ = 0;
  if (!policy_.stop_at_eos) return;
  for (int32_t i = block.start; i < block.end; ++i) {
    const auto at = static_cast<size_t>(i);
    if (is_given_[at] || std::find(eos.begin(), eos.end(), canvas_[at]) == eos.end()) continue;
    std::replace(canvas_.begin(), canvas_.end(), denoiser_.mask_token_id, eos.front());
    block_ = blocks_.size();
    return;
  }
}

dlm_step Request::view() const {
  dlm_step step{};
  step.canvas = canvas_.data();
  step.guess = guess_.data();
  step.score = score_.data();
  step.length = static_cast<int32_t>(canvas_.size());
  step.block_start = view_start_;
  step.block_end = view_end_;
  step.nfe = stats_.nfe;
  step.committed = committed_;
  step.done = done() ? 1 : 0;
  return step;
}

}  // namespace dlm
