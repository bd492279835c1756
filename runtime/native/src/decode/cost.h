// A linear cost model of passes. `dlm-export bench --cost` fits it to measured passes.
#pragma once

namespace dlm {

// The work of a pass, or one request's share of it.
struct PassLoad {
  double tokens = 0, rows = 0;  // rows: scored rows
  double pairs = 0;             // (token, visible position) pairs, within each request

  PassLoad& operator+=(const PassLoad& other) {
    tokens += other.tokens;
    rows += other.rows;
    pairs += other.pairs;
    return *this;
  }
};

// Milliseconds: a fixed cost per pass, plus a cost per token, row and pair.
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
