// A Request holds one request's canvas and plan, and commits tokens after each pass.
//
// A request is either done, or at a stage whose next pass must be made. The constructor and step()
// call settle(), which moves to the next such stage. For each pass, the caller calls find_positions
// and needs, makes the pass, and calls step. step() gets the proposals and commits them; once the
// block is full, it edits instead. Then it calls settle(). Every decided token goes through take(),
// which writes it and notifies the proposer.
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

// One request's canvas and its progress. A Request selects the positions that a pass must score,
// and commits tokens after the pass. It does not run passes.
class Request {
 public:
  // undecided has a 1 for each position to fill. Until such a position is decided, passes see the
  // token that `canvas` has there. The caller has checked the ids and lengths. If steps is above 0,
  // it is the number of passes planned for the whole generation. If proposer is NULL, the policy's
  // own proposer is used. Throws Error(DLM_INVALID_ARGUMENT, DLM_UNSUPPORTED), also if the engine
  // is too small for a pass of the plan.
  Request(const Denoiser& denoiser, const Engine& engine, const Policy& policy,
          std::vector<int32_t> canvas, std::vector<uint8_t> undecided, int32_t steps,
          std::unique_ptr<Proposer> proposer = nullptr);

  // True if this request and `other` can run in lockstep. With a cache, this requires that their
  // passes run over the same rows.
  bool fits(const Request& other) const;
  bool has_cache() const { return policy_.cache != Cache::none; }
  double guidance() const { return policy_.cfg_scale; }  // guidance scale; 0: no guidance
  size_t canvases() const {
    return guidance() > 0 ? 2 : 1;
  }  // number of canvases that this
     // request has in a pass

  bool done() const { return stage_ == plan_.size(); }
  size_t stage_number() const { return stage_; }
  const Stage& stage() const { return plan_[stage_]; }
  const std::vector<int32_t>& canvas() const { return canvas_; }
  // Canvas 0 is the request's canvas. With guidance, canvas 1 is the same with all given tokens
  // masked.
  const std::vector<int32_t>& canvas(size_t number) const {
    return number == 0 ? canvas_ : unconditional_;
  }
  // by position: 1 if it is undecided, otherwise 0
  const std::vector<uint8_t>& undecided() const { return undecided_; }
  bool is_given(size_t position) const { return is_given_[position]; }
  // true if decided tokens may be replaced
  bool edits() const { return policy_.remask == Remask::edit; }
  int32_t nfe() const { return nfe_; }
  dlm_step view() const;

  // The load of the next pass. Call find_positions first.
  PassLoad load() const { return load_of(stage(), positions_.size()); }
  // The load of the most expensive remaining stage that may take several passes.
  PassLoad usual_load(const PassCost& cost) const;

  // Finds the positions that the next pass must score. Returns their number, which is 0 if the pass
  // only stores rows.
  size_t find_positions();
  // the positions found, ascending
  const std::vector<int32_t>& positions() const { return positions_; }
  Needs needs() const;  // outputs that the next pass must return; empty if it scores no rows

  // Commits tokens after a pass that scored the positions of find_positions. Throws
  // Error(DLM_ENGINE_FAILED).
  void step(const Predictions& predictions, Proposals& proposals);

  // Ends a request early. Does nothing if the request is done. Each undecided position takes the
  // last pass's proposal. Without a proposal it takes the token of the proposer's completion, and
  // without that an end token. These positions still count as undecided. `why` is a DLM_FINISH_
  // constant.
  void end(int32_t why);
  void drop() noexcept;  // like end(), but does not fill the canvas, so it needs no memory

  // The fields of dlm_result that a finished request knows. The pointers in it belong to the
  // request.
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
  // is_made_: the stage has made a pass. is_editing_: all positions of the block are decided, and
  // passes may replace their tokens.
  bool is_made_ = false, is_editing_ = false;
  // step_: passes made in this stage. masked_: positions that were undecided before the first of
  // them.
  int32_t step_ = 0, masked_ = 0;
  // edits_: editing passes over the full block. nfe_: all passes of the request.
  int32_t edits_ = 0, nfe_ = 0;
  std::vector<int32_t> positions_;  // set by find_positions
  bool is_constrained_;
  std::unique_ptr<Proposer> proposer_;
  std::vector<int32_t> order_, guess_;
  std::vector<float> score_, log_probs_;
  std::vector<double> losses_;  // by position, see Proposals::losses; empty without a constraint
  int32_t finish_ = DLM_FINISH_NONE;  // set if the request ended early
  std::vector<Certain> certain_;
  int32_t committed_ = 0, view_start_ = 0, view_end_ = 0;
};

}  // namespace dlm
