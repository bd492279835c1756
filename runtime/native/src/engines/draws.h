// Draws of tokens: their settings and results. If the logits of a pass stay on a device, the engine
// draws there. The kernel in engines/cuda/draw_kernel.h includes this file, so the file can only
// include headers that NVRTC gets (engines/cuda/nvrtc.cc).
#pragma once

#include <math.h>

#include <cstdint>

namespace dlm {

// Settings for drawing a token at a temperature above 0. Before the draw, tokens are cut, which
// means that they cannot be drawn. First, only the `top_k` most likely tokens stay. If `top_k` is
// 0, all tokens stay. Then, only the n most likely tokens stay. n is the smallest number for which
// the probabilities of the n tokens add up to more than `top_p`. The probabilities are computed at
// the given temperature.
struct Sampling {
  double temperature, top_p;
  int32_t top_k;
};

// The random numbers of a draw depend only on this key: the seed, the number of the pass, and the
// canvas position.
struct DrawKey {
  uint64_t seed;
  uint32_t step, position;
};

// A drawn token, and properties of the distribution. If a logit is NaN or +inf, all fields except
// the token are NaN.
struct Draw {
  int32_t token;
  double prob;             // probability of the token
  double margin, entropy;  // largest minus second largest probability; sum of p ln p
};

// Selects which fields of a Draw are computed. `token`: only the token. `distribution`: the token,
// prob and margin. `entropy`: all fields.
enum class Told { token, distribution, entropy };

// The work for one scored row of a pass.
struct DrawRow {
  Sampling sampling;  // if the temperature is 0, no token is drawn from the row
  DrawKey key;
  Told told;
  // If `is_guided` is true, the row's logits are combined with those of the row `unconditional`
  // (decode/guidance.h), and the row's candidates and entropy are computed from the guided logits.
  bool is_guided;
  int32_t unconditional;
  double guidance;  // the guidance scale
};

struct Drawn {
  Draw draw;
  double behind;  // the logit of the drawn token minus the largest logit of the row
};

// Returns the guided logit of a token. `with` is the token's logit with the prompt, and `without`
// the logit without the prompt.
inline float guided_logit(float with, float without, double scale) {
  constexpr float kLowest = -3.402823466e+38f;
  const double guided = static_cast<double>(without) +
                        (scale + 1) * (static_cast<double>(with) - static_cast<double>(without));
  // If one of the two predictions gives a token the logit -inf, the token's guided logit is -inf
  // too, so it is ruled out. A guided logit that overflows to -inf must not rule its token out, so
  // it becomes the lowest finite number.
  return with == -HUGE_VALF || without == -HUGE_VALF ? -HUGE_VALF
         : guided < static_cast<double>(kLowest)     ? kLowest
         : guided > -static_cast<double>(kLowest)    ? HUGE_VALF
                                                     : static_cast<float>(guided);
}

// Returns the log odds of a token, computed from those of the row's best token. `behind` is the
// logit of the token minus that of the best token.
inline double log_odds_behind(double behind, double best_log_odds) {
  if (behind >= 0) return best_log_odds;
  // exp(-best_log_odds) is the sum of all other exponentials, divided by that of the best token.
  return behind - log(exp(-best_log_odds) - expm1(behind));
}

}  // namespace dlm
