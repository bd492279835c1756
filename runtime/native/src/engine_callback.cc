// The engine whose passes the caller makes: tests drive the loop with a torch denoiser, services with whatever they have.
#include "engine.h"
#include "error.h"

namespace dlm {
namespace {

class Callback final : public HostEngine {
 public:
  Callback(dlm_pass_fn function, void* user, CacheShape cache)
      : HostEngine(std::move(cache)), function_(function), user_(user) {}

  void run(const dlm_pass& pass, const std::vector<Segment>&) override {
    const dlm_status status = function_(user_, &pass);
    if (status == DLM_OK) return;
    fail(status, "the pass callback returned %d (%s)", static_cast<int>(status), dlm_status_name(status));
  }

  std::string description() const override { return "callback"; }

 private:
  dlm_pass_fn function_;
  void* user_;
};

}  // namespace

std::unique_ptr<HostEngine> make_callback(dlm_pass_fn run, void* user, CacheShape cache) {
  if (run == nullptr) fail(DLM_INVALID_ARGUMENT, "the pass callback is NULL");
  return std::make_unique<Callback>(run, user, std::move(cache));
}

}  // namespace dlm
