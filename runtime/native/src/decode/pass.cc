#include "decode/pass.h"

#include <algorithm>
#include <limits>

#include "base/error.h"

namespace dlm {
namespace {

bool has_conditioning(const Denoiser& denoiser, const Piece& piece) {
  if (piece.conditioning == nullptr || piece.conditioning->empty()) return false;
  const size_t wanted = static_cast<size_t>(piece.rows.tokens()) * denoiser.passed_conditioning();
  if (piece.conditioning->size() != wanted)
    fail(DLM_INTERNAL, "a pass of %d rows with %zu numbers of self-conditioning, not %zu",
         piece.rows.tokens(), piece.conditioning->size(), wanted);
  return true;
}

// Returns the self-conditioning of all pieces, in their order. Uses the memory of `joined`, unless
// there is only one piece.
const float* join_conditioning(const Denoiser& denoiser, const std::vector<Piece>& pieces,
                               std::vector<float>& joined) {
  if (pieces.size() == 1 && has_conditioning(denoiser, pieces.front()))
    return pieces.front().conditioning->data();
  joined.clear();
  for (const Piece& piece : pieces) {
    if (has_conditioning(denoiser, piece))
      joined.insert(joined.end(), piece.conditioning->begin(), piece.conditioning->end());
    else
      joined.resize(joined.size() +
                    static_cast<size_t>(piece.rows.tokens()) * denoiser.passed_conditioning());
  }
  return joined.data();
}

}  // namespace

Pass prepare_pass(const Denoiser& denoiser, const std::vector<Piece>& pieces, int32_t batch,
                  Buffers& buffers) {
  buffers.input_ids.clear(), buffers.position_ids.clear();
  for (const Piece& piece : pieces) {
    const auto [first, last] = piece.rows;
    const int64_t longest = denoiser.max_canvas_length;
    const int64_t moved = longest * (1 + int{piece.is_updated});
    buffers.input_ids.insert(buffers.input_ids.end(), piece.canvas->begin() + first,
                             piece.canvas->begin() + last);
    const auto move_of = [&](int32_t i) {
      if (!denoiser.blocks_after_prompt) return i < piece.draft_rows ? 0 : moved;
      const int32_t after = i - piece.first_block;
      return after < 0 ? 0 : longest * (1 + after / denoiser.visible_block);
    };
    for (int32_t i = first; i < last; ++i) buffers.position_ids.push_back(move_of(i) + i);
  }
  Pass pass{};
  pass.struct_size = sizeof(dlm_pass);
  pass.batch = batch;
  pass.tokens = static_cast<int32_t>(buffers.input_ids.size()) / batch;
  pass.input_ids = buffers.input_ids.data();
  pass.position_ids = buffers.position_ids.data();
  if (denoiser.passed_conditioning() > 0)
    pass.conditioning = join_conditioning(denoiser, pieces, buffers.conditioning);
  return pass;
}

void prepare_scores(const Denoiser& denoiser, Pass& pass, const Needs& needs, Buffers& buffers) {
  const size_t scored = buffers.score_rows.size(), candidates = scored * denoiser.top_k;
  buffers.top_tokens.resize(candidates);
  buffers.top_probs.resize(candidates);
  buffers.top_log_odds.resize(candidates);
  pass.rows = static_cast<int32_t>(scored / pass.batch);
  pass.score_rows = buffers.score_rows.data();
  pass.top_tokens = buffers.top_tokens.data();
  pass.top_probs = buffers.top_probs.data();
  pass.top_log_odds = buffers.top_log_odds.data();
  if (needs.entropy) buffers.entropy.resize(scored), pass.entropy = buffers.entropy.data();
  if (denoiser.conditioning_size > 0) {
    buffers.temperature.assign(scored, 1);
    pass.temperature = buffers.temperature.data();
  }
  if (needs.conditioning) {
    buffers.next_conditioning.resize(scored * denoiser.passed_conditioning());
    pass.next_conditioning = buffers.next_conditioning.data();
  }
  if (needs.draws) {
    buffers.draws.denoiser = &denoiser;
    buffers.draws.rows.assign(scored, {});
    buffers.draws.drawn.resize(scored);
    pass.draws = &buffers.draws;
  }
  if (!needs.logits) return;
  buffers.logits.resize(scored * denoiser.vocab_size);
  pass.logits = buffers.logits.data();
}

void rule_out_unused(const Denoiser& denoiser, const dlm_pass& pass) {
  if (pass.logits == nullptr) return;
  const int64_t rows = static_cast<int64_t>(pass.batch) * pass.rows;
  for (int64_t row = 0; row < rows; ++row)
    for (const auto& [first, last] : denoiser.unused_tokens)
      std::fill_n(pass.logits + row * denoiser.vocab_size + first, last - first,
                  -std::numeric_limits<float>::infinity());
}

Predictions predictions_of(const Denoiser& denoiser, const Request& request, const Pass& pass,
                           size_t first, size_t apart, Buffers& buffers) {
  const size_t candidate = first * denoiser.top_k, width = denoiser.vocab_size;
  const Predictions found{pass.top_tokens + candidate,
                          pass.top_probs + candidate,
                          pass.top_log_odds + candidate,
                          pass.entropy == nullptr ? nullptr : pass.entropy + first,
                          pass.logits == nullptr ? nullptr : pass.logits + first * width,
                          pass.next_conditioning == nullptr
                              ? nullptr
                              : pass.next_conditioning + first * denoiser.passed_conditioning(),
                          pass.draws == nullptr ? nullptr : pass.draws->drawn.data() + first};
  if (request.rules_out_expand() && !request.positions().empty()) {
    float* const logits = pass.logits + first * width;
    for (size_t row = 0; row < request.positions().size(); ++row)
      logits[row * width + denoiser.expand_token_id] = -std::numeric_limits<float>::infinity();
    return buffers.guided.predict(denoiser, logits, request.positions().size());
  }
  const bool guides_here = request.guidance() > 0 && pass.draws == nullptr;
  if (!guides_here || request.positions().empty()) return found;
  return buffers.guided.guide(denoiser, request.guidance(), found, found.logits + apart * width,
                              request.positions().size());
}

void check_batch(const Engine& engine, int32_t batch) {
  if (batch <= engine.max_batch()) return;
  fail(DLM_UNSUPPORTED,
       "a pass of %d requests, but the engine takes at most %d: set max_batch = %d, or open the "
       "bundle with engine \"onnxruntime\", which takes any number",
       batch, engine.max_batch(), engine.max_batch());
}

void time_passes(const Denoiser& denoiser, const Engine& engine, Context& context, Buffers& buffers,
                 int32_t batch, int32_t tokens, int32_t cached, int32_t rows, double* seconds,
                 size_t repeats, const std::function<void()>& before_pass) {
  const int32_t longest = denoiser.max_canvas_length;
  if (batch < 1 || batch > kMostRequests)
    fail(DLM_INVALID_ARGUMENT, "a pass of %d requests is outside 1..%d", batch, kMostRequests);
  if (tokens < 1 || cached < 0 || rows < 1 || rows > tokens || tokens > longest ||
      cached > longest - tokens)
    fail(DLM_INVALID_ARGUMENT,
         "a pass of %d tokens over %d cached ones that scores %d rows: tokens must be at least 1, "
         "tokens plus cached at most %d, and rows in 1..tokens",
         tokens, cached, rows, longest);
  if (cached > 0 && !denoiser.has_cache)
    fail(DLM_UNSUPPORTED, "this denoiser has no key/value cache: cached must be 0");
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
      canvas[i] = i >= cached && i < cached + rows && denoiser.has_mask_token()
                      ? denoiser.mask_token_id
                      : (i + request) % denoiser.vocab_size;
  }
  const auto prepare = [&](Range range) {
    std::vector<Piece> pieces;
    for (const std::vector<int32_t>& canvas : made_up) pieces.push_back({&canvas, range});
    return prepare_pass(denoiser, pieces, batch, buffers);
  };
  if (cached > 0) {
    Pass full = prepare({0, length});
    buffers.score_rows.assign(made_up.size(), 0);
    prepare_scores(denoiser, full, {}, buffers);
    before_pass();
    context.run(full, CacheUse::write, false);
    context.keep_outside(cached, length);
  }
  Pass pass = prepare({cached, length});
  pass.cached = cached;
  buffers.score_rows.clear();
  for (int32_t request = 0; request < batch; ++request)
    for (int32_t row = 0; row < rows; ++row) buffers.score_rows.push_back(row);
  Needs needs;
  needs.conditioning = denoiser.passed_conditioning() > 0;
  prepare_scores(denoiser, pass, needs, buffers);
  for (size_t i = 0; i < repeats; ++i) {
    before_pass();
    seconds[i] = 0;
    const Stopwatch timer(seconds[i]);
    context.run(pass, cached > 0 ? CacheUse::read : CacheUse::none, false);
  }
}

}  // namespace dlm
