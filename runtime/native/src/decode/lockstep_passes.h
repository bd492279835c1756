// For engines that take one shape a pass: requests of one shape go in lockstep, others take turns.
//
// A lane is a context of the engine and the requests in it. Over a cache, its rows are moved for
// all of them alike: a request that has finished a stage waits for the slowest, its rows computed
// and ignored. A request that has ended leaves at the next pass that reads no cache, which over the
// cache `block` means the first block alone. Without a cache each goes at its own pace.
//
// Invariants. A lane has a context while it has a member, and the context goes back to spare_ with
// the last one. Nobody joins a lane after its first pass, because the cache lacks the newcomer's
// rows. Lane::rows maps the batch of the last pass to members: as long as passes read the cache,
// the batch keeps that order, and the rows of a member that has left run another member's tokens,
// which nobody reads. leave() runs in a destructor: start() reserves what it needs.
#pragma once

#include <cstdint>
#include <list>
#include <memory>
#include <vector>

#include "decode/pass_maker.h"

namespace dlm {

class LockstepPasses final : public PassMaker {
 public:
  // rows: of keys and values of all requests. lanes: open at once. denoiser and engine outlive it.
  LockstepPasses(const Denoiser& denoiser, Engine& engine, int64_t rows, size_t lanes);
  ~LockstepPasses() override;

  // So many requests that fit each other may share a lane (1). They join before its first pass.
  void set_together(size_t requests) { together_ = requests; }

  // A context that no request uses now, for passes without one.
  Context& spare_context();

  int64_t rows() const override { return rows_; }
  bool has_room(const Request& request) const override;
  std::unique_ptr<Member> start(Request& request) override;
  std::vector<size_t> choose(const std::vector<Member*>& members,
                             const PassLimits& limits) override;
  dlm_pass run(const std::vector<Member*>& members, Buffers& buffers,
               PassSeconds& seconds) override;
  uint64_t cache_bytes() const override;

 private:
  class LaneMember;
  struct Lane;

  const Lane* find_lane(const Request& request) const;
  void leave(LaneMember& member) noexcept;

  const Denoiser& denoiser_;
  Engine& engine_;
  const int64_t rows_;
  const size_t most_lanes_;
  size_t together_ = 1;
  int64_t rows_taken_ = 0;
  std::list<Lane> lanes_;
  std::vector<std::unique_ptr<Context>> spare_;  // contexts without a lane
};

}  // namespace dlm
