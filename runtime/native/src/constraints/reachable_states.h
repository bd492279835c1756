// The ways of an automaton over positions of a canvas: tokens and states that are possible there.
#pragma once

#include <cstdint>
#include <limits>
#include <utility>
#include <vector>

#include "constraints/automaton.h"

namespace dlm {

// Whether the denoiser rules a token out. Engines pass no other logits than finite ones and -inf;
// NaN counts as ruled out here, so that no comparison meets it.
inline bool is_ruled_out(float logit) { return !(logit > -std::numeric_limits<float>::infinity()); }

// What may stand at a position, and how its tokens are weighed.
struct Place {
  int32_t token = -1;             // alone, or beside `other`; -1: any token
  int32_t other = -1;             // -1: none
  const float* logits = nullptr;  // [V]; NULL: all tokens weigh the same, but `best` more
  int32_t best = -1;  // of the logits: the lowest of the tokens whose logit is the highest; -1:
                      // none, without logits

  // What logits are counted from, so that sums stay small: the best one, or 0 if all are ruled out.
  float base() const { return is_ruled_out(logits[best]) ? 0 : logits[best]; }
};

class Ways {
 public:
  explicit Ways(const Automaton& automaton) : automaton_(automaton) {}

  // Finds the states that can be met before each place, and behind the last, by ways from `state`
  // on; what the places before had in common with these is known already.
  void meet(int32_t state, const std::vector<Place>& places);
  const std::vector<int32_t>& before(size_t place) const { return met_[place]; }  // ascending

  // The states (1 or 0 each) from which `places` lead to a text that can end within `room` tokens.
  std::vector<uint8_t> reaching(const std::vector<Place>& places, int32_t room);

  // Says which place the next questions are of; then, whether a token of a group may stand there.
  void look_at(const Place& place);
  bool may_stand(int32_t group);

 private:
  // Turns edges_to_ and is_open_ of the states `before` into those of `now`; both lists ascend.
  void move_open(const std::vector<int32_t>& before, const std::vector<int32_t>& now);
  static void list(const std::vector<uint8_t>& marks, std::vector<int32_t>& states);

  const Automaton& automaton_;
  std::vector<std::vector<int32_t>> met_;  // by place, and one behind the last
  std::vector<std::pair<int32_t, int32_t>>
      stood_;  // tokens and others of the places that these are of
  std::vector<uint8_t> is_met_,
      is_open_;  // by state, filled up to whole words: behind what stands there, behind any token
  std::vector<int32_t>
      edges_to_;  // by state: the edges to it from the states that is_open_ is behind
  Place place_;
  std::vector<int8_t> stands_;  // by group; -1: not asked yet
};

}  // namespace dlm
