// A Request holds the canvas and the plan of one request, and commits tokens after each pass.
//
// A request is either done, or at a stage that needs a pass. For each pass, the caller calls
// find_positions() and needs(), makes the pass, and calls step(). step() asks the proposer for
// proposals, and commits some of these proposals. Once all positions of the block are decided,
// step() replaces tokens instead, if the policy allows replacing tokens. The constructor and step()
// call settle(), which moves to the next stage that needs a pass. Every decided token goes through
// take(), which writes the token to the canvas and notifies the proposer.
#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>
#include <vector>

#include "decode/cost.h"
#include "decode/plan.h"
#include "decode/policy.h"
#include "decode/proposer.h"
#include "engines/engine.h"

namespace dlm {

// One request's canvas and its progress. A Request selects the positions that a pass must score,
// and commits tokens after the pass. A Request does not run passes.
class Request {
 public:
  // `undecided` contains 1 for each position to fill. Until a position is decided, passes see the
  // token that `canvas` contains at this position. The caller must have checked the ids and
  // lengths. If `steps` is above 0, `steps` is the number of passes planned for the whole
  // generation. If `proposer` is NULL, the request uses the proposer that the policy asks for.
  // `top_log_probs` is the number of alternatives to keep for each token that a pass commits.
  // Throws Error(DLM_INVALID_ARGUMENT) or Error(DLM_UNSUPPORTED), for example if the plan contains
  // a pass that is too large for the engine.
  Request(const Denoiser& denoiser, const Engine& engine, const Policy& policy,
          std::vector<int32_t> canvas, std::vector<uint8_t> undecided, int32_t steps,
          std::unique_ptr<Proposer> proposer = nullptr, int32_t top_log_probs = 0);

  // Returns true if this request and `other` can share passes in lockstep. If the two requests use
  // a cache, their passes must run over the same rows.
  bool fits(const Request& other) const;
  bool has_cache() const { return policy_.cache != Cache::none; }
  double guidance() const { return policy_.cfg_scale; }  // returns the guidance scale, or 0
  size_t canvases() const {
    return guidance() > 0 ? 2 : 1;
  }  // returns the number of canvases that this request needs in a pass

  // Returns the number of leading positions whose rows (of keys and values) may come from another
  // request that has the same tokens there. With full attention, this is 0 unless the policy allows
  // approximate rows.
  int32_t reusable() const;
  // Returns true if the next pass fills the cache with the rows of positions before the first
  // block.
  bool is_filling() const {
    return stage().use == CacheUse::append && stage().kind == PassKind::prefill &&
           stage().rows.first < stage().block.first;
  }
  // Removes the first `rows` positions from the next passes, which fill the cache, because their
  // rows are already stored. Call this function only before the first pass, or if is_filling().
  // `rows` is a multiple of the length of a block, and at most reusable().
  void skip_stored(int32_t rows);
  // Splits the passes that fill the cache before the first block, so that each part has at most
  // `most_tokens` tokens, and takes at most `most_ms` predicted milliseconds if `most_ms` is above
  // 0. Each part has at least one block. Call this function before the first pass. Does nothing
  // with full attention, where such a pass cannot be split.
  void split_prefill(int32_t most_tokens, double most_ms, const PassCost& cost);
  // Returns the number of leading positions whose rows are final once the next pass is made: no
  // later pass of this request computes them again, and other requests may use them. `exact` is
  // this number before the pass. With block-causal attention, final rows are exact.
  int32_t exact_after(int32_t exact) const;

  bool done() const { return stage_ == plan_.size(); }
  size_t stage_number() const { return stage_; }
  const Stage& stage() const { return plan_[stage_]; }
  const std::vector<int32_t>& canvas() const { return canvas_; }
  // Returns a canvas by its index. Canvas 0 is the request's canvas. With guidance, there is also
  // canvas 1, a copy in which mask tokens replace the prompt and all other tokens of the caller.
  const std::vector<int32_t>& canvas(size_t number) const {
    return number == 0 ? canvas_ : unconditional_;
  }
  // One entry per position: 1 if the position is undecided, otherwise 0.
  const std::vector<uint8_t>& undecided() const { return undecided_; }
  bool is_given(size_t position) const { return is_given_[position]; }
  // True if later passes may replace decided tokens.
  bool edits() const { return policy_.remask == Remask::edit; }
  int32_t nfe() const { return nfe_; }
  int32_t committed() const { return committed_; }  // positions that the last pass decided
  // Returns the number of passes so far, as if no pass was skipped or split.
  int32_t planned_nfe() const { return nfe_ + skipped_; }
  dlm_step view() const;

  // Returns the load of the next pass, from which the caller predicts the pass's time. Call
  // find_positions() first.
  PassLoad load() const { return load_of(stage(), positions_.size()); }
  // Returns the load of the most expensive of the remaining stages that may take several passes.
  PassLoad usual_load(const PassCost& cost) const;

  // Finds the positions that the next pass must score. Returns the number of positions, which is 0
  // if the pass only stores rows.
  size_t find_positions();
  // The positions that find_positions found, in ascending order.
  const std::vector<int32_t>& positions() const { return positions_; }
  // The row of the pass that predicts a position.
  int32_t row_of(int32_t position) const {
    return std::max(position - stage().shift, 0) - stage().rows.first;
  }
  Needs needs() const;  // outputs that the next pass must return; empty if the pass scores no rows

  // Commits tokens after a pass. The pass must have scored the positions that find_positions found.
  // Throws Error(DLM_ENGINE_FAILED).
  void step(const Predictions& predictions, Proposals& proposals);

  // Ends a request early and fills its canvas. Does nothing if the request is done. Each undecided
  // position takes the token that the last pass proposed. If the last pass proposed no token, the
  // position takes the token that the proposer's complete() chooses. If complete() chooses no
  // token, the position takes an end token. All positions that end() fills still count as
  // undecided. `why` is a DLM_FINISH_ constant.
  void end(int32_t why);
  void drop() noexcept;  // like end(), but does not fill the canvas, and so needs no memory

  // Returns the fields of dlm_result that a finished request knows. The request owns the memory to
  // which the fields point.
  dlm_result result() const;

 private:
  PassLoad load_of(const Stage& stage, size_t rows) const;
  // Random numbers depend on planned_nfe(), so that they do not depend on the rows that are stored.
  Turn turn() const {
    return {canvas_, undecided_, positions_, stage().block, planned_nfe(), is_editing_};
  }
  // Puts an end token at the last position if the policy reserves this position. The position then
  // counts as given.
  void reserve();
  int32_t count_undecided(Range range) const;
  void check_limits(const Engine& engine) const;
  void check_prediction(size_t row, int32_t token, double prob, double score) const;
  void propose(const Predictions& predictions, Proposals& proposals);
  int32_t planned() const;  // returns the number of positions that the schedule commits next
  void commit(const Predictions& predictions, const Proposals& proposals);
  void edit(const Predictions& predictions, const Proposals& proposals);
  void draft(const Proposals& proposals);
  void verify(const Predictions& predictions, const Proposals& proposals);
  bool verifies() const { return policy_.commit == Commit::verify; }
  void note_guesses(const Proposals& proposals);
  void limit(const Proposals& proposals, std::vector<int32_t>& chosen) const;
  void take(const Predictions& predictions, const Proposals& proposals,
            const std::vector<int32_t>& chosen);
  void take(int32_t position, int32_t token, double log_prob, double loss = 0);
  void keep_alternatives(const Predictions& predictions, size_t row);
  double loss_of(const Certain& certain, const Predictions* predictions) const;
  void scaffold(Range range, const Predictions* predictions = nullptr);
  void settle(const Predictions* predictions = nullptr);
  bool end_early(Range block);

  const Denoiser& denoiser_;
  Policy policy_;
  std::vector<int32_t> canvas_, unconditional_;
  std::vector<uint8_t> undecided_;
  std::vector<bool> is_given_;
  bool is_reserved_ = false;
  std::vector<Stage> plan_;
  size_t stage_ = 0;
  // is_made_: the stage has made a pass. is_editing_: all positions of the block are decided, but
  // passes may still replace their tokens.
  bool is_made_ = false, is_editing_ = false;
  // step_: number of passes made in this stage. masked_: number of positions that were undecided
  // before the stage's first pass.
  int32_t step_ = 0, masked_ = 0;
  // edits_: number of editing passes over the current block. nfe_: number of all passes of the
  // request.
  int32_t edits_ = 0, nfe_ = 0;
  // The number of passes that skip_stored() removed, minus the number that split_prefill() added.
  int32_t skipped_ = 0;
  std::vector<int32_t> positions_;  // set by find_positions
  bool is_constrained_;
  std::unique_ptr<Proposer> proposer_;
  std::vector<int32_t> order_, guess_;
  std::vector<float> score_, log_probs_;
  // The alternatives of each position, top_count_ per position. See dlm_result.
  size_t top_count_;
  std::vector<int32_t> top_tokens_;
  std::vector<float> top_log_probs_;
  // One loss per position, see Proposals::losses; empty without a constraint.
  std::vector<double> losses_;
  int32_t finish_ = DLM_FINISH_NONE;  // set if the request ended early
  std::vector<Certain> certain_;
  int32_t committed_ = 0, view_start_ = 0, view_end_ = 0;
};

}  // namespace dlm
