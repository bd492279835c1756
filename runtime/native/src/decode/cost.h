// What passes cost on a machine, as `dlm-export bench --cost` fits it to measured passes.
#pragma once

namespace dlm {

// What a pass computes, or one request's part of it.
struct PassLoad {
  double tokens = 0, rows = 0;  // rows: that are scored
  double pairs = 0;             // of a token and a position that it sees, of its own request

  PassLoad& operator+=(const PassLoad& other) {
    tokens += other.tokens;
    rows += other.rows;
    pairs += other.pairs;
    return *this;
  }
};

// Milliseconds of a pass, and of each of what it computes.
struct PassCost {
  double pass = 0, token = 0, row = 0, pair = 0;

  bool is_known() const { return pass > 0 || token > 0 || row > 0 || pair > 0; }
  // What a part adds to a pass.
  double share(const PassLoad& load) const {
    return token * load.tokens + row * load.rows + pair * load.pairs;
  }
  double of(const PassLoad& load) const { return pass + share(load); }
};

}  // namespace dlm
