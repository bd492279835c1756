// Predicts the time of a pass with a linear model. `dlm-export bench --cost` measures passes and
// fits the model's coefficients to the measured times.
#pragma once

namespace dlm {

// The amount of work in a pass, or in one request's share of the pass.
struct PassLoad {
  double tokens = 0, rows = 0;  // `rows` is the number of rows that the pass scores
  // The number of pairs of a token and a position that the token sees. The token and the position
  // belong to the same request.
  double pairs = 0;

  PassLoad& operator+=(const PassLoad& other) {
    tokens += other.tokens;
    rows += other.rows;
    pairs += other.pairs;
    return *this;
  }
};

// The coefficients of the model, in milliseconds. Each pass has a fixed cost. Each token, each
// scored row and each pair of PassLoad adds a cost.
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
