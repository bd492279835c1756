// For engines that take one shape per pass: equal requests run in lockstep, others take turns.
//
// A lane is an engine context and the requests in it. With a cache, a lane's requests go through
// the stages together: one that is early waits for the slowest, and its rows are computed but
// ignored. An ended request leaves the lane before the next pass that reads no cache. With cache
// `block`, only the first block has one. Without a cache, each request has its own pace.
//
// Invariants. A lane has a context while it has a member; the context returns to spare_ with the
// last member. No request joins a lane after its first pass, because the cache lacks its rows.
// Lane::rows maps the batch of the last pass to members. While passes read the cache, that order
// stays; the rows of a member that has left run another member's tokens, and are ignored. leave()
// runs in a destructor, so start() reserves its memory.
#pragma once

#include <cstdint>
#include <list>
#include <memory>
#include <vector>

#include "decode/pass_maker.h"

namespace dlm {

class LockstepPasses final : public PassMaker {
 public:
  // rows, lanes: limits for all requests together. denoiser and engine must outlive it.
  LockstepPasses(const Denoiser& denoiser, Engine& engine, int64_t rows, size_t lanes);
  ~LockstepPasses() override;

  // The most requests of one shape in a lane (default 1). They join before its first pass.
  void set_together(size_t requests) { together_ = requests; }

  // A context that no request is using, for passes outside any request.
  Context& spare_context();

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

  std::list<Lane>::const_iterator find_lane(const Request& request) const;
  void leave(LaneMember& member) noexcept;

  const Denoiser& denoiser_;
  Engine& engine_;
  const size_t most_lanes_;
  size_t together_ = 1;
  int64_t rows_taken_ = 0;
  std::list<Lane> lanes_;
  std::vector<std::unique_ptr<Context>> spare_;  // contexts without a lane
};

}  // namespace dlm
