// Predicts the time of a pass with a linear model. `dlm-export bench --cost` measures passes, and
// fits the coefficients of the model to the measured times.
#pragma once

namespace dlm {

// The amount of work in a whole pass, or the part of this work that one request causes.
struct PassLoad {
  double tokens = 0, rows = 0;  // numbers of computed tokens and of scored rows
  // The number of attention pairs. A pair is a token and a position that the token attends to, both
  // in the same request.
  double pairs = 0;

  PassLoad& operator+=(const PassLoad& other) {
    tokens += other.tokens;
    rows += other.rows;
    pairs += other.pairs;
    return *this;
  }
};

// The coefficients of the model, in milliseconds. The time of a pass is a fixed time, plus a time
// for each token, for each scored row, and for each attention pair.
struct PassCost {
  double pass = 0, token = 0, row = 0, pair = 0;

  bool is_known() const { return pass > 0 || token > 0 || row > 0 || pair > 0; }
  // Returns the predicted time of `load` in milliseconds, without the fixed time of a pass.
  double share(const PassLoad& load) const {
    return token * load.tokens + row * load.rows + pair * load.pairs;
  }
  double of(const PassLoad& load) const { return pass + share(load); }
};

}  // namespace dlm
