// One pass that several requests share, whatever their positions: each is a segment of one row of
// tokens.
#pragma once

#include <cstdint>
#include <functional>
#include <vector>

#include "cache/arena.h"
#include "decode/loop.h"

namespace dlm {

// A request that takes part in shared passes, and where its rows are. It gives them back when it
// goes.
class Member {
 public:
  // There must be room for rows_of(request).
  Member(Request& request, Arena& arena);
  ~Member();
  Member(const Member&) = delete;
  Member& operator=(const Member&) = delete;

  // What a request keeps in an arena: of its canvas, and of the one without what is given where it
  // is guided.
  static std::vector<int32_t> rows_of(const Request& request);

 private:
  friend class SharedPass;
  Member(Request& request, Arena& arena, size_t places);

  Request& request_;
  Arena& arena_;
  std::vector<Arena::Handle> places_;  // of its canvases
  Range kept_{0, 0};  // outside of which the cache's rows were kept, and nothing was stored since;
                      // or of no tokens
};

// What a pass that several share keeps within.
struct PassLimits {
  int32_t most_tokens;
  double most_ms;  // 0: any time
  PassCost cost;   // by which it is expected
};

// The next pass of those that were added.
class SharedPass {
 public:
  SharedPass(const Denoiser& denoiser, Arena& arena) : denoiser_(denoiser), arena_(arena) {}

  // Whether a request that is not done takes part: it does if the pass has no other, or stays
  // within the limits, and within a bound of the memory that logits take.
  bool add(Member& member, const PassLimits& limits);
  const PassLoad& load() const { return load_; }

  // Makes the pass and commits after it. Throws what the pass throws, of which all of its requests
  // fail; on_error is told of one that fails by itself, with its number in the order of adding,
  // inside a handler.
  void run(Buffers& buffers, dlm_stats& stats, dlm_pass_counts& counts,
           const std::function<void(size_t number)>& on_error);

 private:
  void count(dlm_pass_counts& counts) const;

  const Denoiser& denoiser_;
  Arena& arena_;
  std::vector<Member*> members_;
  PassLoad load_;
  Needs needs_;
};

}  // namespace dlm
