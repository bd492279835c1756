#include "decode/request.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <utility>

#include "base/error.h"
#include "decode/random.h"

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
  if (verifies() && is_constrained_)
    fail(DLM_UNSUPPORTED,
         "policy: commit = \"verify\" generates the most likely tokens, and cannot follow a "
         "constraint or a question: use another rule, such as \"threshold\"");
  if (is_ahead() && is_constrained_)
    fail(DLM_UNSUPPORTED,
         "policy: next_block = %.10g decides positions of several blocks, and cannot follow a "
         "constraint or a question: use next_block = 1",
         policy_.next_block);
  if (renoises() && is_constrained_)
    fail(DLM_UNSUPPORTED,
         "policy: remask = \"noise\" starts each block from random tokens, and cannot follow a "
         "constraint or a question: use remask = \"none\" with a denoiser that has a mask token");
  if (guidance() > 0 && engine.max_batch() < 2)
    fail(DLM_UNSUPPORTED,
         "policy: cfg_scale = %.10g needs two canvases per pass, one without the prompt, but the "
         "engine takes one: use cfg_scale = 0, or open the bundle with engine \"onnxruntime\"",
         guidance());
  if (start_length > 0 && start_length < longest_) {
    // The largest passes are those of the last block that the canvas may get.
    const std::vector<uint8_t> undecided = std::exchange(undecided_, {});
    undecided_.assign(undecided.size(), 0);
    std::fill(undecided_.end() - std::min(growth(), longest_ - start_length), undecided_.end(), 1);
    plan_ = plan_passes(undecided_, policy_, denoiser_, 0, engine);
    check_limits();
    canvas_.resize(start_length);
    undecided_.assign(undecided.begin(), undecided.begin() + start_length);
  }
  given_ = static_cast<int32_t>(std::count(undecided_.begin(), undecided_.end(), 0));
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
  undecided_.resize(length, 1);
  canvas_.resize(length, denoiser_.mask_token_id);
}

bool Request::grow() {
  const auto length = static_cast<int32_t>(canvas_.size());
  if (length == longest_ || has_end()) return false;
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

bool Request::has_end() const {
  for (size_t at = 0; at < canvas_.size(); ++at)
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

void Request::check_limits() const {
  const auto length = static_cast<int32_t>(canvas_.size());
  const bool is_prefix = policy_.cache == Cache::prefix, is_full = dlm::is_full(policy_.cache);
  std::vector<Stage> plan = plan_;
  // verify() plans the later blocks, so the plan does not contain them yet. The largest passes are
  // those of a whole block at the end of the canvas, so this code checks only such a block.
  if (verifies() && !plan.empty() && plan.back().block.last < length)
    plan_verified(plan, policy_, denoiser_,
                  std::max(plan.back().block.last, length - policy_.block_length), length);
  if (is_ahead() && has_cache()) {
    // choose_rows() changes the rows of each pass. A pass may start at any block.
    for (const Stage& stage : plan_) {
      plan.push_back(stage);
      plan.back().rows.first = plan.back().cached = stage.block.first;
    }
  }
  for (const Stage& stage : plan) {
    const int32_t tokens = stage.rows.tokens();
    const bool is_opening = is_full && !stage.is_repeated();
    int32_t rows = count_undecided(stage.decided);
    // The opening pass of a block (see plan.h) decides at least one position. So each later pass of
    // the block scores at least one position fewer.
    if (is_full && stage.is_repeated()) --rows;
    if (is_ahead()) rows = count_undecided({stage.decided.first, length});
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

bool Request::fits(const Request& other) const {
  const auto same = [](const Stage& one, const Stage& two) {
    return one.rows == two.rows && one.use == two.use && one.block == two.block;
  };
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
  // With the commit rule `verify`, later passes depend on the request's tokens. So a request with
  // this rule cannot run in lockstep. The same is true for next_block below 1.
  if (verifies() || other.verifies() || is_ahead() || other.is_ahead()) return false;
  return std::equal(plan_.begin(), plan_.end(), other.plan_.begin(), other.plan_.end(), same);
}

int32_t Request::reusable() const {
  if (!has_cache() || done()) return 0;
  if (denoiser_.visible_block == 0)
    // Only the first pass computes the cache rows before the returned position.
    return policy_.reuse_prompt != 0 ? std::max(0, plan_.front().block.first - policy_.refresh) : 0;
  // A shifted denoiser predicts the first position of a block in the row just before the block. So
  // a pass of this request must compute this row.
  return std::max(0, plan_.front().block.first - causal_shift(policy_, denoiser_));
}

void Request::skip_stored(int32_t rows) {
  const auto next = plan_.begin() + static_cast<std::ptrdiff_t>(stage_);
  for (auto it = next; it != plan_.end() && it->rows.first < rows; ++it) {
    it->rows.first = it->cached = std::min(rows, it->rows.last);
    if (it->use == CacheUse::write) it->use = CacheUse::refresh;
  }
  const auto first =
      std::find_if(next, plan_.end(), [](const Stage& stage) { return stage.rows.tokens() > 0; });
  skipped_ += static_cast<int32_t>(first - next);
  plan_.erase(next, first);
  step_ = 0;
  masked_ = count_undecided(stage().decided);
  settle();
}

void Request::split_prefill(int32_t most_tokens, double most_ms, const PassCost& cost) {
  const int32_t block = denoiser_.visible_block;
  if (block == 0) return;
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

int32_t Request::exact_after(int32_t exact) const {
  const Stage& now = stage();
  if (denoiser_.visible_block == 0) return keeps_rows(now.use) ? reusable() : exact;
  if (now.use != CacheUse::append || now.rows.first > exact) return exact;
  return std::max(exact, std::min(now.rows.last, now.block.first));
}

size_t Request::find_positions() {
  if (renoises() && stage().is_repeated() && step_ == 0) write_noise(0);
  const Range open = window();
  const bool may_edit = this->may_edit(stage()) && (is_editing_ || count_undecided(open) > 0);
  const Range range = may_edit ? stage().block : open;
  positions_.clear();
  for (int32_t i = range.first; i < range.last; ++i)
    if (undecided_[i] != 0 ? i >= open.first && i < open.last : may_edit && !is_given_[i])
      positions_.push_back(i);
  return positions_.size();
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
        load_of(stage, may_edit(stage) ? stage.block.tokens() : stage.decided.tokens());
    if (cost.share(load) > cost.share(most)) most = load;
  };
  for (size_t number = stage_; number < plan_.size(); ++number)
    if (plan_[number].is_repeated()) add(plan_[number]);
  if (verifies()) {
    // verify() plans the later blocks. The passes over a block at the end of the canvas cost the
    // most, so this code adds them.
    const auto length = static_cast<int32_t>(canvas_.size());
    std::vector<Stage> last;
    plan_verified(last, policy_, denoiser_, std::max(1, length - policy_.block_length), length);
    for (const Stage& stage : last) add(stage);
  }
  return most;
}

Needs Request::needs() const {
  if (positions_.empty()) return {};
  if (guidance() > 0) return {false, true};
  Needs found = proposer_->needs(turn());
  found.conditioning = denoiser_.passed_conditioning() > 0;
  // If the caller wants at most top_k alternatives for each position, the candidates are enough,
  // and the pass need not return logits.
  found.logits = found.logits || top_count_ > static_cast<size_t>(denoiser_.top_k);
  return found;
}

void Request::step(const Predictions& predictions, Proposals& proposals) {
  committed_ = 0;
  std::fill(guess_.begin(), guess_.end(), -1);
  std::fill(score_.begin(), score_.end(), 0.0f);
  if (!positions_.empty()) {
    propose(predictions, proposals);
    if (renoises())
      renoise(predictions, proposals);
    else if (!verifies())
      commit(predictions, proposals);
    else if (stage().is_draft)
      draft(proposals);
    else
      verify(predictions, proposals);
  }
  ++nfe_;
  is_made_ = true;
  ++(is_editing_ ? edits_ : step_);
  view_start_ = stage().block.first;
  view_end_ = is_ahead() ? window().last : stage().block.last;
  if (is_ahead()) close();
  settle(&predictions);
}

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
  return policy_.score == Score::entropy && !is_editing_ ? score : fraction_of(score);
}

void Request::propose(const Predictions& predictions, Proposals& proposals) {
  // These checks must come first, because propose() uses the token ids as indices into the logits.
  for (size_t row = 0; row < positions_.size(); ++row) {
    const size_t best = row * denoiser_.top_k;
    check_prediction(row, predictions.tokens[best], predictions.probs[best], 0);
  }
  proposals.resize(positions_.size());
  proposer_->propose(turn(), predictions, proposals);
  for (size_t row = 0; row < positions_.size(); ++row)
    check_prediction(row, proposals.tokens[row], proposals.probs[row], reported(proposals, row));
  for (size_t row = 0; is_constrained_ && row < positions_.size(); ++row)
    proposals.losses[row] =
        log_prob_loss(predictions.probs[row * denoiser_.top_k], proposals.probs[row]);
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
    const auto later = std::lower_bound(positions_.begin(), positions_.end(), stage().decided.last);
    choose_ahead(policy_, proposals.scores, static_cast<size_t>(later - positions_.begin()),
                 order_);
  } else {
    choose_commits(proposals);
  }
  note_guesses(proposals);
  take(predictions, proposals, order_);
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
// token is the last decided position instead. Then plans the next block. The draft does not include
// the last position of a block. At this position, the canvas contains the mask token, which always
// differs from the proposed token.
void Request::verify(const Predictions& predictions, const Proposals& proposals) {
  note_guesses(proposals);
  order_.clear();
  for (size_t row = 0; row < positions_.size(); ++row) {
    const int32_t token = proposals.tokens[row];
    order_.push_back(static_cast<int32_t>(row));
    if (canvas_[positions_[row]] != token) break;
    if (policy_.stop != Stop::none && denoiser_.is_end(token)) break;
  }
  for (const int32_t position : positions_) canvas_[position] = denoiser_.mask_token_id;
  take(predictions, proposals, order_);
  const int32_t next = positions_[order_.size() - 1] + 1;
  const auto length = static_cast<int32_t>(canvas_.size());
  if (next < length) plan_verified(plan_, policy_, denoiser_, next, length);
}

void Request::write_noise(int32_t step) {
  const Range range = stage().decided;
  for (int32_t i = range.first; i < range.last; ++i)
    if (undecided_[i] != 0)
      canvas_[i] = random_token(policy_.seed, static_cast<uint32_t>(step), static_cast<uint32_t>(i),
                                denoiser_.vocab_size, denoiser_.mask_token_id);
}

// The chosen positions get their proposed tokens, and all others get new random tokens
// (DiffusionGemma). The result of the block is the most likely tokens of its last pass.
void Request::renoise(const Predictions& predictions, Proposals& proposals) {
  order_.resize(static_cast<size_t>(choose(policy_, proposals.scores, 0, order_)));
  const bool is_last = is_stable(predictions, proposals) || step_ + 1 >= stage().steps;
  if (!is_last) {
    write_noise(step_ + 1);
    for (const int32_t row : order_) canvas_[positions_[row]] = proposals.tokens[row];
  }
  for (size_t row = 0; row < positions_.size(); ++row) {
    const size_t best = row * denoiser_.top_k;
    proposals.tokens[row] = predictions.tokens[best];
    proposals.probs[row] = predictions.probs[best];
  }
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

bool Request::is_stable(const Predictions& predictions, const Proposals& proposals) {
  if (policy_.stable_entropy == 0) return false;
  bool is_equal = step_ > 0;
  best_.resize(positions_.size());
  for (size_t row = 0; row < positions_.size(); ++row) {
    const int32_t token = predictions.tokens[row * denoiser_.top_k];
    is_equal = is_equal && best_[row] == token;
    best_[row] = token;
  }
  stable_ = is_equal ? stable_ + 1 : 0;
  double entropy = 0;
  for (const double score : proposals.scores) entropy -= score;
  return stable_ >= policy_.stable_passes &&
         entropy / static_cast<double>(positions_.size()) < policy_.stable_entropy;
}

float Request::graph_temperature() const {
  return static_cast<float>(std::clamp(temperature(), 1e-30, 1e30));
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
    const double prob = logits == nullptr ? predictions.probs[best + at]
                                          : prob_of(tokens[at], logits, predictions.tokens[best],
                                                    predictions.probs[best]);
    check_prediction(row, tokens[at], prob, 0);
    top_log_probs_[first + at] = static_cast<float>(finite_log(prob));
  }
}

void Request::end(int32_t why) {
  if (done()) return;
  if (is_constrained_) extend(longest_);  // the rest of the text may need this room
  std::vector<int32_t> guess = guess_;
  proposer_->complete(canvas_, undecided_, guess);
  for (size_t at = 0; at < canvas_.size(); ++at) {
    if (undecided_[at] == 0) continue;
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

void Request::scaffold(Range range, const Predictions* predictions) {
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
  return log_prob_loss(prob, prob_of(certain.token, logits, predictions->tokens[best], prob));
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
    step_ = 0;
    masked_ = count_undecided(stage().decided);
  }
}

// Called before a pass over several blocks. If enough positions of the last of these blocks are
// decided, later passes also decide positions of the next block (d3LLM).
void Request::widen() {
  if (has_cache()) choose_rows();
  if (last_stage_ < stage_) {
    last_stage_ = stage_;
    return;
  }
  const Range last = plan_[last_stage_].decided;
  const double decided = 1 - static_cast<double>(count_undecided(last)) / last.tokens();
  if (last_stage_ + 1 < plan_.size() && decided >= policy_.next_block) ++last_stage_;
}

// Chooses the rows of the next pass if passes decide positions of several blocks and use a cache
// (d3LLM). The cache contains the prompt and decided blocks. The rows of a block are stored
// `cache_delay` passes after the block was found to be decided. Until then, passes run the whole
// canvas, because the rows of other blocks may still change. Each pass whose number is a multiple
// of `refresh_interval` computes all cached rows again.
void Request::choose_rows() {
  Stage& now = plan_[stage_];
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

// Called after a pass over several blocks. If the policy stops at end tokens, all positions after
// the first generated end token become end tokens, as in d3LLM's code.
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
