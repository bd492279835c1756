// Predicts the time of a pass with a linear model. `dlm-export bench --cost` measures passes and
// fits the model's coefficients to the measured times.
#pragma once

namespace dlm {

// The amount of work in a pass, or in one request's share of a pass.
struct PassLoad {
  double tokens = 0, rows = 0;  // `rows` is the number of rows that the pass scores
  // The number of pairs that consist of a token and a position that the token sees. Both belong to
  // the same request.
  double pairs = 0;

  PassLoad& operator+=(const PassLoad& other) {
    tokens += other.tokens;
    rows += other.rows;
    pairs += other.pairs;
    return *this;
  }
};

// The coefficients of the model, in milliseconds. A pass costs a fixed time, plus a time for each
// token, for each scored row, and for each pair that PassLoad counts.
struct PassCost {
  double pass = 0, token = 0, row = 0, pair = 0;

  bool is_known() const { return pass > 0 || token > 0 || row > 0 || pair > 0; }
  // Returns the predicted time in milliseconds that `load` adds to a pass, without the pass's fixed
  // cost.
  double share(const PassLoad& load) const {
    return token * load.tokens + row * load.rows + pair * load.pairs;
  }
  double of(const PassLoad& load) const { return pass + share(load); }
};

}  // namespace dlm
