// One request: its canvas, the stages of its plan, and the commits after each pass.
//
// A request is either done or at a stage with a pass to make: the constructor and step() call
// settle(), which moves to the next such stage. The order for a pass is find_positions, needs, the
// pass, step. step() proposes, commits (or edits, once the block is full), and settles. take()
// writes every decided token and notifies the proposer.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "decode/cost.h"
#include "decode/plan.h"
#include "decode/policy.h"
#include "decode/proposer.h"
#include "engines/engine.h"

namespace dlm {

// A request's canvas: selects the positions that a pass scores, and commits. Makes no passes.
class Request {
 public:
  // undecided: 1 for each position to fill; passes see the canvas's own token there until it is
  // decided. The caller has checked ids and lengths. steps > 0: passes planned for the whole
  // generation. proposer: NULL for the policy's own. Throws Error(DLM_INVALID_ARGUMENT,
  // DLM_UNSUPPORTED), also if the engine is too small for a pass of the plan.
  Request(const Denoiser& denoiser, const Engine& engine, const Policy& policy,
          std::vector<int32_t> canvas, std::vector<uint8_t> undecided, int32_t steps,
          std::unique_ptr<Proposer> proposer = nullptr);

  // True if both can run in lockstep: with a cache, their passes must run over the same rows.
  bool fits(const Request& other) const;
  bool has_cache() const { return policy_.cache != Cache::none; }
  double guidance() const { return policy_.cfg_scale; }       // 0: none
  size_t canvases() const { return guidance() > 0 ? 2 : 1; }  // of this request in a pass

  bool done() const { return stage_ == plan_.size(); }
  size_t stage_number() const { return stage_; }
  const Stage& stage() const { return plan_[stage_]; }
  const std::vector<int32_t>& canvas() const { return canvas_; }
  // Guidance: canvas 1 is the one with all given tokens masked.
  const std::vector<int32_t>& canvas(size_t number) const {
    return number == 0 ? canvas_ : unconditional_;
  }
  const std::vector<uint8_t>& undecided() const { return undecided_; }  // by position, 1 or 0
  bool is_given(size_t position) const { return is_given_[position]; }
  bool edits() const { return policy_.remask == Remask::edit; }  // decided tokens may change
  int32_t nfe() const { return nfe_; }
  dlm_step view() const;

  // The load of the next pass; call find_positions first.
  PassLoad load() const { return load_of(stage(), positions_.size()); }
  // The load of the costliest stage ahead that may take several passes.
  PassLoad usual_load(const PassCost& cost) const;

  // Finds the positions that the next pass scores. Returns their number; 0 if the pass only stores.
  size_t find_positions();
  const std::vector<int32_t>& positions() const { return positions_; }  // ascending
  Needs needs() const;  // of that pass; empty if it scores no rows

  // Commits after a pass over find_positions' positions. Throws Error(DLM_ENGINE_FAILED).
  void step(const Predictions& predictions, Proposals& proposals);

  // Ends a request early; does nothing if it is done. Each undecided position takes the last pass's
  // proposal, else the proposer's completion, else an end token. They still count as undecided.
  // why: DLM_FINISH_...
  void end(int32_t why);
  void drop() noexcept;  // like end(), but leaves the canvas unchanged, so it needs no memory

  // The fields of dlm_result that a finished request knows. Its pointers belong to the request.
  dlm_result result() const;

 private:
  PassLoad load_of(const Stage& stage, size_t rows) const;
  Turn turn() const { return {canvas_, undecided_, positions_, stage().block, nfe_, is_editing_}; }
  int32_t count_undecided(Range range) const;
  void check_limits(const Engine& engine) const;
  void propose(const Predictions& predictions, Proposals& proposals);
  void commit(const Proposals& proposals);
  void edit(const Proposals& proposals);
  void limit(const Proposals& proposals, std::vector<int32_t>& chosen) const;
  void take(const Proposals& proposals, const std::vector<int32_t>& chosen);
  void take(int32_t position, int32_t token, double log_prob, double loss = 0);
  double loss_of(const Certain& certain, const Predictions* predictions) const;
  void scaffold(Range range, const Predictions* predictions = nullptr);
  void settle(const Predictions* predictions = nullptr);
  bool end_early(Range block);

  const Denoiser& denoiser_;
  Policy policy_;
  std::vector<int32_t> canvas_, unconditional_;
  std::vector<uint8_t> undecided_;
  std::vector<bool> is_given_;
  std::vector<Stage> plan_;
  size_t stage_ = 0;
  bool is_made_ = false, is_editing_ = false;  // the stage had a pass; its block is full
  int32_t step_ = 0, masked_ = 0;   // passes of the stage; undecided positions before them
  int32_t edits_ = 0, nfe_ = 0;     // passes over its full block; passes of the request
  std::vector<int32_t> positions_;  // set by find_positions
  bool is_constrained_;
  std::unique_ptr<Proposer> proposer_;
  std::vector<int32_t> order_, guess_;
  std::vector<float> score_, log_probs_;
  std::vector<double> losses_;  // by position, see Proposals::losses; empty without a constraint
  int32_t finish_ = DLM_FINISH_NONE;  // set if the request was ended early
  std::vector<Certain> certain_;
  int32_t committed_ = 0, view_start_ = 0, view_end_ = 0;
};

}  // namespace dlm
