// The paths of an automaton over positions of a canvas: the tokens and states possible there.
#pragma once

#include <cstdint>
#include <limits>
#include <utility>
#include <vector>

#include "constraints/automaton.h"

namespace dlm {

// True if the denoiser rules a token out. Engines return only finite logits and -inf. NaN counts as
// ruled out, so that comparisons never see it.
inline bool is_ruled_out(float logit) { return !(logit > -std::numeric_limits<float>::infinity()); }

// The tokens allowed at a position, and their weights.
struct Place {
  int32_t token = -1;             // allowed alone, or together with `other`; -1: any token
  int32_t other = -1;             // -1: none
  const float* logits = nullptr;  // [V]; NULL: all tokens weigh 0, except that `best` weighs more
  int32_t best = -1;              // the lowest token with the highest logit; -1: none, or no logits

  // Subtracted from logits to keep sums small: the best logit, or 0 if all are ruled out.
  float base() const { return is_ruled_out(logits[best]) ? 0 : logits[best]; }
};

class Ways {
 public:
  explicit Ways(const Automaton& automaton) : automaton_(automaton) {}

  // Finds the states reachable from `state` before each place and after the last. Reuses the
  // results for the leading places that are unchanged since the last call.
  void meet(int32_t state, const std::vector<Place>& places);
  const std::vector<int32_t>& before(size_t place) const { return met_[place]; }  // ascending

  // The states (1 or 0 each) from which `places` can lead to a text that ends within `room` tokens.
  std::vector<uint8_t> reaching(const std::vector<Place>& places, int32_t room);

  // look_at sets the place; may_stand returns whether it allows a token of the group.
  void look_at(const Place& place);
  bool may_stand(int32_t group);

 private:
  // Updates edges_to_ and is_open_ from the states `before` to those of `now`; both lists ascend.
  void move_open(const std::vector<int32_t>& before, const std::vector<int32_t>& now);
  static void list(const std::vector<uint8_t>& marks, std::vector<int32_t>& states);

  const Automaton& automaton_;
  std::vector<std::vector<int32_t>> met_;           // by place, plus one after the last
  std::vector<std::pair<int32_t, int32_t>> stood_;  // token and other of the places of met_
  // By state, padded to whole words: reachable by the allowed tokens, by any token.
  std::vector<uint8_t> is_met_, is_open_;
  std::vector<int32_t> edges_to_;  // by state: the number of edges to it from the current states
  Place place_;
  std::vector<int8_t> stands_;  // by group; -1: not computed yet
};

}  // namespace dlm
