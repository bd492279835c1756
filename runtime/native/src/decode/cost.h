// A linear model of the time that a pass takes. `dlm-export bench --cost` fits its coefficients to
// measured passes.
#pragma once

namespace dlm {

// The amount of work in a pass, or in one request's share of the pass.
struct PassLoad {
  double tokens = 0, rows = 0;  // rows: the rows to score
  double pairs = 0;             // (token, position that it sees) pairs, within each request

  PassLoad& operator+=(const PassLoad& other) {
    tokens += other.tokens;
    rows += other.rows;
    pairs += other.pairs;
    return *this;
  }
};

// The coefficients, in milliseconds: a fixed cost per pass, and the costs of a token, a row and a
// pair.
struct PassCost {
  double pass = 0, token = 0, row = 0, pair = 0;

  bool is_known() const { return pass > 0 || token > 0 || row > 0 || pair > 0; }
  // The milliseconds that `load` adds to a pass.
  double share(const PassLoad& load) const {
    return token * load.tokens + row * load.rows + pair * load.pairs;
  }
  double of(const PassLoad& load) const { return pass + share(load); }
};

}  // namespace dlm
