// The proposer of a constrained request: every token is of the most likely text that the automaton accepts, so that any of them may
// commit together.
//
// The constraint is of the positions from the first undecided one of the request up to the last. Given tokens among them are part of
// the text. Behind a block a text only has to be possible: in the room that is left, with what is decided there.
#pragma once

#include <memory>
#include <vector>

#include "automaton.h"
#include "proposer.h"
#include "viterbi.h"

namespace dlm {

class Constrained final : public Proposer {
 public:
  // Throws Error(DLM_INVALID_ARGUMENT) where no text fits into the canvas, and Error(DLM_UNSUPPORTED) for an automaton of another
  // vocabulary or a policy that draws. denoiser must outlive it.
  Constrained(const Denoiser& denoiser, const Policy& policy, std::shared_ptr<const Automaton> automaton,
              const std::vector<int32_t>& canvas, const std::vector<uint8_t>& undecided);

  Needs needs(const Turn& turn) const override;
  void propose(const Turn& turn, const Predictions& predictions, Proposals& proposals) override;
  void scaffold(const std::vector<int32_t>& canvas, const std::vector<uint8_t>& undecided, Range range,
                std::vector<Certain>& certain) override;
  bool is_whole() const override { return true; }
  void note(int32_t position, int32_t token) override;

 private:
  int32_t state_before(int32_t position, const std::vector<int32_t>& canvas);
  std::vector<uint8_t> ends_behind(int32_t position, const std::vector<int32_t>& canvas, const std::vector<uint8_t>& undecided);
  void fill_places(int32_t first, int32_t last, const std::vector<int32_t>& canvas, const std::vector<uint8_t>& undecided);

  const Denoiser& denoiser_;
  const Policy policy_;
  const std::shared_ptr<const Automaton> automaton_;
  Range range_;                  // of the canvas, that the constraint is of
  std::vector<int32_t> states_;  // before the positions from its first on, as far as they are known
  Viterbi viterbi_;
  std::vector<Place> places_;
  std::vector<int32_t> path_, only_;
};

}  // namespace dlm
