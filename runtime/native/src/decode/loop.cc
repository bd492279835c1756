#include "decode/loop.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>

#include "base/error.h"

namespace dlm {

dlm_pass prepare_pass(const std::vector<const std::vector<int32_t>*>& canvases, int32_t first,
                      int32_t last, Buffers& buffers) {
  buffers.input_ids.clear();
  buffers.position_ids.clear();
  for (const std::vector<int32_t>* const canvas : canvases) {
    buffers.input_ids.insert(buffers.input_ids.end(), canvas->begin() + first,
                             canvas->begin() + last);
    for (int32_t i = first; i < last; ++i) buffers.position_ids.push_back(i);
  }
  dlm_pass pass{};
  pass.batch = static_cast<int32_t>(canvases.size());
  pass.tokens = last - first;
  pass.input_ids = buffers.input_ids.data();
  pass.position_ids = buffers.position_ids.data();
  return pass;
}

void prepare_scores(const Denoiser& denoiser, dlm_pass& pass, Buffers& buffers) {
  const size_t candidates = buffers.score_rows.size() * static_cast<size_t>(denoiser.top_k);
  buffers.top_tokens.resize(candidates);
  buffers.top_probs.resize(candidates);
  pass.rows = static_cast<int32_t>(buffers.score_rows.size() / static_cast<size_t>(pass.batch));
  pass.score_rows = buffers.score_rows.data();
  pass.top_tokens = buffers.top_tokens.data();
  pass.top_probs = buffers.top_probs.data();
}

void prepare_needs(const Denoiser& denoiser, dlm_pass& pass, const Needs& needs, Buffers& buffers) {
  const size_t scored = buffers.score_rows.size();
  if (needs.entropy) buffers.entropy.resize(scored), pass.entropy = buffers.entropy.data();
  if (needs.logits)
    buffers.logits.resize(scored * static_cast<size_t>(denoiser.vocab_size)),
        pass.logits = buffers.logits.data();
}

Predictions predictions_of(const Denoiser& denoiser, const Request& request, const dlm_pass& pass,
                           size_t first, size_t apart, Buffers& buffers) {
  const size_t candidate = first * static_cast<size_t>(denoiser.top_k);
  const auto width = static_cast<size_t>(denoiser.vocab_size);
  const Predictions found{pass.top_tokens + candidate, pass.top_probs + candidate,
                          pass.entropy == nullptr ? nullptr : pass.entropy + first,
                          pass.logits == nullptr ? nullptr : pass.logits + first * width};
  if (request.guidance() == 0 || request.positions().empty()) return found;
  return buffers.guided.guide(denoiser, request.guidance(), found, found.logits + apart * width,
                              request.positions().size());
}

void check_batch(const Engine& engine, int32_t batch) {
  if (batch <= engine.max_batch()) return;
  fail(DLM_UNSUPPORTED,
       "a pass of %d requests, but the engine takes %d at a time: give max_batch = %d, or open the "
       "bundle with engine "
       "\"onnxruntime\", which takes any number",
       batch, engine.max_batch(), engine.max_batch());
}

void time_passes(const Denoiser& denoiser, const Engine& engine, Context& context, Buffers& buffers,
                 int32_t batch, int32_t tokens, int32_t cached, int32_t rows, double* seconds,
                 size_t repeats, const std::function<void()>& before_pass) {
  const int32_t longest = denoiser.max_canvas_length;
  if (batch < 1 || batch > kMostRequests)
    fail(DLM_INVALID_ARGUMENT, "a pass of %d requests: a batch has 1..%d", batch, kMostRequests);
  if (tokens < 1 || cached < 0 || rows < 1 || rows > tokens || tokens > longest ||
      cached > longest - tokens)
    fail(DLM_INVALID_ARGUMENT,
         "a pass of %d tokens over %d cached ones that scores %d rows: tokens must be 1 or more, "
         "with the cached ones at most %d, "
         "and rows in 1..tokens",
         tokens, cached, rows, longest);
  if (cached > 0 && !denoiser.has_cache)
    fail(DLM_UNSUPPORTED, "this denoiser keeps no keys and values: cached must be 0");
  check_batch(engine, batch);
  const int32_t length = cached + tokens;
  if (rows > engine.max_rows(tokens, cached) || (cached > 0 && engine.max_rows(length, 0) < 1))
    fail(DLM_INVALID_ARGUMENT,
         "a pass of %d tokens over %d cached ones that scores %d rows, after a full pass of %d "
         "tokens, but the engine takes %s",
         tokens, cached, rows, length, engine.limits().c_str());
  if (repeats == 0) return;
  std::vector<std::vector<int32_t>> made_up;
  for (int32_t request = 0; request < batch; ++request) {
    std::vector<int32_t>& canvas = made_up.emplace_back(static_cast<size_t>(length));
    for (int32_t i = 0; i < length; ++i)
      canvas[static_cast<size_t>(i)] = i >= cached && i < cached + rows
                                           ? denoiser.mask_token_id
                                           : (i + request) % denoiser.vocab_size;
  }
  std::vector<const std::vector<int32_t>*> canvases;
  for (const std::vector<int32_t>& canvas : made_up) canvases.push_back(&canvas);
  if (cached > 0) {
    dlm_pass full = prepare_pass(canvases, 0, length, buffers);
    buffers.score_rows.assign(canvases.size(), 0);
    prepare_scores(denoiser, full, buffers);
    before_pass();
    context.run(full, CacheUse::write);
    context.keep_outside(cached, length);
  }
  dlm_pass pass = prepare_pass(canvases, cached, length, buffers);
  pass.cached = cached;
  buffers.score_rows.clear();
  for (int32_t request = 0; request < batch; ++request)
    for (int32_t row = 0; row < rows; ++row) buffers.score_rows.push_back(row);
  prepare_scores(denoiser, pass, buffers);
  for (size_t i = 0; i < repeats; ++i) {
    before_pass();
    seconds[i] = 0;
    const Stopwatch timer(seconds[i]);
    context.run(pass, cached > 0 ? CacheUse::read : CacheUse::none);
  }
}

namespace {

// ln of the best token's probability minus ln of another one's. A probability that underflows
// counts as the smallest double, so that the loss is finite: at most 745 nats.
double log_prob_loss(double best, double prob) {
  constexpr double least = std::numeric_limits<double>::denorm_min();
  return std::max(0.0, std::log(std::max(best, least)) - std::log(std::max(prob, least)));
}

}  // namespace

Request::Request(const Denoiser& denoiser, const Engine& engine, const Policy& policy,
                 std::vector<int32_t> canvas, std::vector<uint8_t> undecided, int32_t steps,
                 std::string name, std::unique_ptr<Proposer> proposer)
    : denoiser_(denoiser),
      policy_(suit_policy(policy, denoiser.visible_block, denoiser.shift)),
      name_(std::move(name)),
      canvas_(std::move(canvas)),
      undecided_(std::move(undecided)),
      is_constrained_(proposer != nullptr),
      proposer_(is_constrained_ ? std::move(proposer) : make_proposer(denoiser, policy_)) {
  if (policy_.cache != Cache::none && !denoiser_.has_cache)
    fail(DLM_UNSUPPORTED, "policy: this denoiser keeps no keys and values: use cache = \"none\"");
  for (const uint8_t is_undecided : undecided_) is_given_.push_back(is_undecided == 0);
  if (guidance() > 0) {
    if (engine.max_batch() < 2)
      fail(DLM_UNSUPPORTED,
           "policy: cfg_scale = %.10g takes two canvases a pass, one without the prompt, and the "
           "engine takes one: use cfg_scale = "
           "0, or open the bundle with engine \"onnxruntime\"",
           guidance());
    unconditional_ = canvas_;
    for (size_t at = 0; at < canvas_.size(); ++at)
      if (is_given_[at]) unconditional_[at] = denoiser_.mask_token_id;
  }
  plan_ = plan_passes(undecided_, policy_, denoiser_.visible_block, denoiser_.shift, steps, engine);
  check_limits(engine);
  guess_.assign(canvas_.size(), -1);
  score_.assign(canvas_.size(), 0.0f);
  log_probs_.assign(canvas_.size(), std::numeric_limits<float>::quiet_NaN());
  if (is_constrained_) losses_.assign(canvas_.size(), 0);
  scaffold({0, static_cast<int32_t>(canvas_.size())});
  if (!plan_.empty()) masked_ = count_undecided(plan_.front().decided);
  settle();
}

int32_t Request::count_undecided(Range range) const {
  return static_cast<int32_t>(
      std::count(undecided_.begin() + range.first, undecided_.begin() + range.last, 1));
}

void Request::check_limits(const Engine& engine) const {
  const auto length = static_cast<int32_t>(canvas_.size());
  const bool is_prefix = policy_.cache == Cache::prefix, is_full = dlm::is_full(policy_.cache);
  for (const Stage& stage : plan_) {
    const int32_t tokens = stage.rows.tokens();
    const bool is_opening = is_full && !stage.is_repeated;
    int32_t rows = count_undecided(stage.decided);
    if (is_full && stage.is_repeated) --rows;  // its opening pass decides one at least
    if (is_full && rows == 0) continue;
    if (stage.is_last && policy_.remask == Remask::edit) rows = count_undecided(stage.block);
    if (std::max(1, rows) <= engine.max_rows(tokens, stage.cached)) continue;
    const char* const advice =
        policy_.cache == Cache::block || policy_.cache == Cache::block_dual
            ? "choose a smaller block_length, if this is no least one"
        : policy_.cache == Cache::none || (is_opening && tokens == length)
            ? "choose a shorter canvas or a smaller block_length"
        : is_opening ? (is_prefix ? "choose cache = \"dual\", or refresh = 0"
                                  : "choose a smaller refresh or block_length, or refresh = 0")
        : is_prefix  ? "choose cache = \"dual\""
                     : "choose a smaller block_length";
    fail(DLM_INVALID_ARGUMENT,
         "this request needs a pass of %d tokens over %d cached ones that scores %d rows, but the "
         "engine takes %s: %s, or build "
         "the engine again with a larger --canvas or --block",
         tokens, stage.cached, rows, engine.limits().c_str(), advice);
  }
}

bool Request::fits(const Request& other) const {
  const auto same = [](const Stage& one, const Stage& two) {
    return one.rows == two.rows && one.use == two.use && one.block == two.block;
  };
  if (canvas_.size() != other.canvas_.size() || has_cache() != other.has_cache()) return false;
  if (!has_cache()) return true;
  // A pass more, for a slower request, would store other rows than the last one that this one's
  // block took.
  if (policy_.store == Store::reuse || other.policy_.store == Store::reuse) return false;
  return std::equal(plan_.begin(), plan_.end(), other.plan_.begin(), other.plan_.end(), same);
}

size_t Request::find_positions() {
  const Range range = is_editing_ ? stage().block : stage().decided;
  positions_.clear();
  for (int32_t i = range.first; i < range.last; ++i)
    if (is_editing_ ? !is_given_[static_cast<size_t>(i)] : undecided_[static_cast<size_t>(i)] != 0)
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
  for (size_t number = stage_; number < plan_.size(); ++number) {
    if (!plan_[number].is_repeated) continue;
    const PassLoad load =
        load_of(plan_[number], static_cast<size_t>(plan_[number].decided.tokens()));
    if (cost.share(load) > cost.share(most)) most = load;
  }
  return most;
}

Needs Request::needs() const {
  if (positions_.empty()) return {};
  return guidance() > 0 ? Needs{false, true} : proposer_->needs(turn());
}

void Request::step(const Predictions& predictions, Buffers& buffers) {
  committed_ = 0;
  std::fill(guess_.begin(), guess_.end(), -1);
  std::fill(score_.begin(), score_.end(), 0.0f);
  if (!positions_.empty()) {
    propose(predictions, buffers.proposals);
    is_editing_ ? edit(buffers.proposals) : commit(buffers.proposals);
  }
  ++nfe_;
  is_made_ = true;
  ++(is_editing_ ? edits_ : step_);
  view_start_ = stage().block.first;
  view_end_ = stage().block.last;
  settle(&predictions);
}

void Request::propose(const Predictions& predictions, Proposals& proposals) {
  const auto check = [&](size_t row, int32_t token, double prob, double score) {
    if (token < 0 || token >= denoiser_.vocab_size || token == denoiser_.mask_token_id)
      fail(DLM_ENGINE_FAILED, "the denoiser predicted token %d at position %d, outside what it may",
           token, positions_[row]);
    if (!std::isfinite(prob) || !std::isfinite(score))
      fail(DLM_ENGINE_FAILED,
           "the denoiser's prediction at position %d is not finite: weights are damaged, or "
           "overflow at this precision",
           positions_[row]);
  };
  for (size_t row = 0; row < positions_.size(); ++row) {  // before anybody looks up a token's logit
    const size_t best = row * static_cast<size_t>(denoiser_.top_k);
    check(row, predictions.tokens[best], predictions.probs[best], 0);
  }
  proposals.resize(positions_.size());
  proposer_->propose(turn(), predictions, proposals);
  for (size_t row = 0; row < positions_.size(); ++row)
    check(row, proposals.tokens[row], proposals.probs[row], proposals.scores[row]);
  for (size_t row = 0; is_constrained_ && row < positions_.size(); ++row)
    proposals.losses[row] = log_prob_loss(
        predictions.probs[row * static_cast<size_t>(denoiser_.top_k)], proposals.probs[row]);
  // Of a block's passes, over a cache of full attention and a shifted denoiser, only the opening
  // one has the row before the block, which predicts its first position: that position is taken as
  // sure there, so that it commits.
  const bool is_opening = !stage().is_repeated && is_full(policy_.cache);
  if (is_opening && denoiser_.shift == 1 && positions_[0] == stage().block.first) {
    // Never below another, whatever the graph calls a probability: left undecided, it would be
    // scored by row -1.
    const double best = *std::max_element(proposals.scores.begin(), proposals.scores.end());
    proposals.scores[0] = std::max(best, policy_.score == Score::entropy ? 0.0 : 1.0);
  }
}

void Request::commit(const Proposals& proposals) {
  const int32_t steps = stage().steps;
  const int32_t planned = policy_.commit == Commit::timestep
                              ? timestep_count(static_cast<int32_t>(positions_.size()), step_,
                                               steps, policy_.timestep_eps)
                              : even_count(masked_, step_, steps);
  order_.resize(static_cast<size_t>(choose(policy_, proposals.scores, planned, order_)));
  limit(proposals, order_);
  for (size_t row = 0; row < positions_.size(); ++row) {
    guess_[static_cast<size_t>(positions_[row])] = proposals.tokens[row];
    score_[static_cast<size_t>(positions_[row])] = static_cast<float>(proposals.scores[row]);
  }
  take(proposals, order_);
}

// LLaDA2.1: what is decided changes where another token is surely better.
void Request::edit(const Proposals& proposals) {
  order_.clear();
  for (size_t row = 0; row < positions_.size(); ++row)
    if (proposals.tokens[row] != canvas_[static_cast<size_t>(positions_[row])] &&
        proposals.scores[row] > policy_.edit_threshold)
      order_.push_back(static_cast<int32_t>(row));
  std::stable_sort(order_.begin(), order_.end(), [&](int32_t a, int32_t b) {
    return proposals.scores[static_cast<size_t>(a)] > proposals.scores[static_cast<size_t>(b)];
  });
  limit(proposals, order_);
  take(proposals, order_);
}

void Request::limit(const Proposals& proposals, std::vector<int32_t>& chosen) const {
  const size_t before = chosen.size();
  proposer_->limit(turn(), proposals, chosen);
  if (chosen.size() > before || (chosen.empty() && !is_editing_))
    fail(DLM_INTERNAL, "a proposer left %zu of %zu positions to commit", chosen.size(), before);
}

void Request::take(const Proposals& proposals, const std::vector<int32_t>& chosen) {
  // A constraint may force a token whose probability rounds to 0. Its logarithm stays finite: sums
  // of it do, and JSON has no infinity.
  constexpr double least = std::numeric_limits<double>::denorm_min();
  for (const int32_t number : chosen) {
    const auto row = static_cast<size_t>(number);
    take(positions_[row], proposals.tokens[row], std::log(std::max(proposals.probs[row], least)),
         proposals.losses[row]);
  }
  committed_ = static_cast<int32_t>(chosen.size());
}

void Request::take(int32_t position, int32_t token, double log_prob, double loss) {
  const auto at = static_cast<size_t>(position);
  canvas_[at] = token;
  if (guidance() > 0) unconditional_[at] = token;
  undecided_[at] = 0;
  log_probs_[at] = static_cast<float>(log_prob);
  if (is_constrained_) losses_[at] = loss;
  guess_[at] = -1;
  score_[at] = 0;
  proposer_->note(position, token);
}

void Request::end(Finish why) {
  if (done()) return;
  std::vector<int32_t> guess = guess_;
  proposer_->complete(canvas_, undecided_, guess);
  for (size_t at = 0; at < canvas_.size(); ++at) {
    if (undecided_[at] == 0) continue;
    if (guess[at] >= 0)
      canvas_[at] = guess[at];
    else if (!denoiser_.eos_token_ids.empty())
      canvas_[at] = denoiser_.eos_token_ids.front();
  }
  finish_ = why;
  stage_ = plan_.size();
}

void Request::drop() noexcept {
  if (done()) return;
  finish_ = Finish::cancelled;
  stage_ = plan_.size();
}

Outcome Request::outcome() const {
  Outcome found{finish_,
                nfe_,
                0,
                0,
                log_probs_,
                undecided_,
                std::accumulate(losses_.begin(), losses_.end(), 0.0)};
  bool is_ended = false;
  for (size_t at = 0; at < canvas_.size(); ++at) {
    is_ended = is_ended || (!is_given_[at] && is_end(canvas_[at]));
    found.prompt_tokens += is_given_[at];
    found.completion_tokens += !is_given_[at] && !is_ended;
  }
  if (done() && finish_ == Finish::none)
    found.finish = is_ended                ? Finish::stop
                   : proposer_->is_whole() ? Finish::constraint
                                           : Finish::length;
  return found;
}

bool Request::is_end(int32_t token) const {
  const auto& eos = denoiser_.eos_token_ids;
  return std::find(eos.begin(), eos.end(), token) != eos.end();
}

void Request::scaffold(Range range, const Predictions* predictions) {
  certain_.clear();
  proposer_->scaffold(canvas_, undecided_, range, certain_);
  for (const Certain& certain : certain_)
    take(certain.position, certain.token, 0, loss_of(certain, predictions));
  committed_ += static_cast<int32_t>(certain_.size());
}

// The loss of a token that needs no pass, by the last pass's predictions; 0 if that pass did not
// score its position.
double Request::loss_of(const Certain& certain, const Predictions* predictions) const {
  const auto found = std::lower_bound(positions_.begin(), positions_.end(), certain.position);
  if (!is_constrained_ || predictions == nullptr || predictions->logits == nullptr) return 0;
  if (found == positions_.end() || *found != certain.position) return 0;
  const auto row = static_cast<size_t>(found - positions_.begin()),
             best = row * static_cast<size_t>(denoiser_.top_k);
  const float* const logits = predictions->logits + row * static_cast<size_t>(denoiser_.vocab_size);
  const float prob = predictions->probs[best];
  return log_prob_loss(prob, prob_of(certain.token, logits, predictions->tokens[best], prob));
}

// Goes on to the stage that has a pass to make. predictions: of the pass that was made just now, if
// one was.
void Request::settle(const Predictions* predictions) {
  while (!done()) {
    const Stage& now = stage();
    scaffold(now.block, predictions);
    const bool is_stored = keeps_rows(now.use);
    const bool is_undecided = count_undecided(now.decided) > 0;
    // A pass that opens a block or a sub-block is for that alone, unless the next one's reaches
    // back no farther than to it.
    const bool is_idle =
        !is_undecided && (is_full(policy_.cache) ? policy_.refresh == 0 : now.rows == now.block);
    if (now.is_repeated ? is_undecided : !is_made_ && !is_idle && (is_stored || is_undecided))
      return;
    if (now.is_last) {
      is_editing_ = policy_.remask == Remask::edit && edits_ < policy_.edit_passes &&
                    (edits_ == 0 || committed_ > 0);
      if (is_editing_ || end_early(now.block)) return;
      edits_ = 0;
    }
    ++stage_;
    is_made_ = false;
    if (done() || stage().decided == now.decided) continue;
    step_ = 0;
    masked_ = count_undecided(stage().decided);
  }
}

// Whether the block ended the request, as it holds an end token.
bool Request::end_early(Range block) {
  if (policy_.stop != Stop::eos) return false;
  for (int32_t i = block.first; i < block.last; ++i) {
    const auto at = static_cast<size_t>(i);
    if (is_given_[at] || !is_end(canvas_[at])) continue;
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
  step.canvas = canvas_.data();
  step.guess = guess_.data();
  step.score = score_.data();
  step.length = static_cast<int32_t>(canvas_.size());
  step.block_start = view_start_;
  step.block_end = view_end_;
  step.nfe = nfe_;
  step.committed = committed_;
  step.done = done() ? 1 : 0;
  return step;
}

bool Batch::done() const {
  return std::all_of(requests_.begin(), requests_.end(),
                     [](const Request& request) { return request.done(); });
}

void Batch::step(Context& context, Buffers& buffers) {
  if (done()) return;
  const Stopwatch total(stats_.total_s);
  const std::vector<Part> parts = find_parts();
  const dlm_pass pass = run_pass(parts, context, buffers);
  const Stopwatch timer(stats_.selection_s);
  for (const Part& part : parts)
    with_name(part.request->name(), [&] {
      const size_t first = part.row * static_cast<size_t>(pass.rows);
      part.request->step(predictions_of(denoiser_, *part.request, pass, first,
                                        static_cast<size_t>(pass.rows), buffers),
                         buffers);
    });
}

// Who takes part in the next pass, all of them over the same range.
std::vector<Batch::Part> Batch::find_parts() {
  const Request* slowest = nullptr;
  for (const Request& request : requests_)
    if (!request.done() && (slowest == nullptr || request.stage_number() < slowest->stage_number()))
      slowest = &request;
  // Those that wait keep their rows in the cache until a pass needs none of it.
  if (rows_.empty() || slowest->stage().cached == 0) {
    rows_.clear();
    for (size_t i = 0; i < requests_.size(); ++i) {
      if (requests_[i].done()) continue;
      rows_.push_back({i, false});
      if (requests_[i].guidance() > 0) rows_.push_back({i, true});
    }
  }
  std::vector<Part> parts;
  for (size_t row = 0; row < rows_.size(); ++row) {
    Request& request = requests_[rows_[row].request];
    const bool waits = request.has_cache() && request.stage_number() != slowest->stage_number();
    if (!rows_[row].is_unconditional && !request.done() && !waits) parts.push_back({&request, row});
  }
  return parts;
}

dlm_pass Batch::run_pass(const std::vector<Part>& parts, Context& context, Buffers& buffers) {
  const Stage stage = parts.front().request->stage();
  const Range rows = stage.rows;
  std::vector<const std::vector<int32_t>*> canvases;
  for (const Row& row : rows_)
    canvases.push_back(row.is_unconditional ? &requests_[row.request].unconditional()
                                            : &requests_[row.request].canvas());
  dlm_pass pass = prepare_pass(canvases, rows.first, rows.last, buffers);
  pass.cached = stage.cached;
  size_t most = 1;  // a pass scores a row at least, whoever looks at it
  Needs needs;
  for (const Part& part : parts) {
    most = std::max(most, part.request->find_positions());
    const Needs own = part.request->needs();
    needs.entropy |= own.entropy;
    needs.logits |= own.logits;
  }
  buffers.score_rows.assign(rows_.size() * most,
                            0);  // a place that exists, where a request has fewer
  for (const Part& part : parts) {
    int64_t* const own = buffers.score_rows.data() + part.row * most;
    int64_t* row = own;
    for (const int32_t position : part.request->positions())
      *row++ = std::max(position - denoiser_.shift, 0) - rows.first;
    if (part.request->guidance() > 0) std::copy(own, row, own + most);
  }
  prepare_scores(denoiser_, pass, buffers);
  prepare_needs(denoiser_, pass, needs, buffers);
  const bool is_stored = keeps_rows(stage.use);
  if (pass.cached > 0 && !(kept_ == rows)) {
    const Stopwatch timer(stats_.cache_s);
    context.keep_outside(rows.first, rows.last);
    kept_ = rows;
  }
  {
    const Stopwatch timer(stage.kind == PassKind::denoise ? stats_.passes_s : stats_.prefill_s);
    context.run(pass, stage.use);
  }
  if (is_stored) kept_ = {0, 0};
  // Before, the context may still say what another batch had.
  if (is_stored || stats_.cache_bytes > 0)
    stats_.cache_bytes = std::max(stats_.cache_bytes, context.cache_bytes());
  ++stats_.nfe;
  ++(stage.kind == PassKind::denoise ? counts_.denoise
     : stage.kind == PassKind::store ? counts_.store
                                     : counts_.prefill);
  return pass;
}

}  // namespace dlm
