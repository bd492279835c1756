// All texts of a constraint over some positions of a canvas, each as likely as its tokens are together: draws of one, and how
// likely a token is at a position among them.
//
// Sums of what lies ahead are made from the last position on, and a draw goes forward over them (forward filtering and backward
// sampling, Carter and Kohn, 1994, the other way around), so that it is exactly one of the tempered rows' product, of those texts
// that the constraint has. A row draws by the same noise as without a constraint (sampling.h).
// exporter/dlm_export/network/constrained.py states the same.
#pragma once

#include <cstdint>
#include <vector>

#include "automaton.h"
#include "sampling.h"
#include "ways.h"

namespace dlm {

// How likely a token of a position is among all texts; and of all its tokens p1 - p2 and sum p ln p.
struct Marginal {
  double prob, margin, entropy;
};

class Texts {
 public:
  // left_out: the mask token, which no text has.
  Texts(const Automaton& automaton, int32_t left_out) : automaton_(automaton), left_out_(left_out), ways_(automaton) {}

  // Sums over all ways from `state` to a state of `ends` (1 or 0 a state), before what follows is asked. Tokens of a place without
  // logits are equally likely. What top_k and top_p cut is taken only where no text has less of it. False where there is no way.
  bool sum(int32_t state, const std::vector<Place>& places, const std::vector<uint8_t>& ends, const Sampling& sampling);

  // Draws one text, a token a place; the first is at key's position.
  void draw(const DrawKey& key, std::vector<int32_t>& tokens);

  // How likely each place's token is. Margins and entropies are of meaning where `with_all`.
  void find_marginals(const std::vector<int32_t>& tokens, bool with_all, std::vector<Marginal>& marginals);

 private:
  using Tokens = std::vector<int32_t>::const_iterator;
  // Of a class or a group at a place: the logarithm of its tokens' sum.
  struct Sum {
    double weight;
    int32_t number;  // of the weighing that it is of
  };
  struct Weighed {
    int32_t group;
    double weight;
  };
  // Of a place.
  struct Layer {
    std::vector<double> ahead;    // by state that is met, the logarithm of the sum over all ways on
    std::vector<Weighed> groups;  // that ways lead through
    Cut cut;
  };

  void weigh_place(size_t place);
  double weigh(int32_t token) const;
  double weigh_class(int32_t number);
  double weigh_whole(Tokens first, Tokens last) const;
  double weigh_group(int32_t group);
  int64_t count_tokens(int32_t state) const;
  void spread(double mass, int32_t state, double all);
  Marginal marginal(int32_t token, bool with_all);
  template <class See>
  void each_token(int32_t group, See see) const;

  const Automaton& automaton_;
  const int32_t left_out_;
  Ways ways_;
  Sampler sampler_;
  Sampling sampling_{};
  int32_t state_ = 0;
  std::vector<Place> places_;
  std::vector<Layer> layers_;  // by place, and one behind the last
  const Place* place_ = nullptr;  // that is being weighed, with its layer
  Layer* layer_ = nullptr;
  double best_ = 0, slope_ = 1;   // its best logit, and what logits are multiplied by
  int32_t weighing_ = 0;
  std::vector<Sum> classes_, groups_;
  std::vector<float> spare_;                     // a draw's Winner's
  std::vector<double> terms_;                    // by edge of a state
  std::vector<double> ahead_;                    // by state, behind the place
  std::vector<double> mass_, mass_behind_;       // by state: how likely it is before the place, and behind it
  std::vector<double> group_mass_, class_mass_;  // how likely each is at the place
};

}  // namespace dlm
