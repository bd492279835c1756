// A version of a model: its settings, its bundle, and the constraints that were compiled last. All
// instances of the version share this object.
#pragma once

#include <cstdint>
#include <list>
#include <memory>
#include <mutex>
#include <string>

#include "request.h"
#include "triton/core/tritonbackend.h"

namespace dlm::triton {

struct Destroy {
  void operator()(dlm_bundle* bundle) const { dlm_bundle_destroy(bundle); }
  void operator()(dlm_automaton* automaton) const { dlm_automaton_destroy(automaton); }
  void operator()(dlm_scheduler* scheduler) const { dlm_scheduler_destroy(scheduler); }
  void operator()(dlm_job* job) const { dlm_job_destroy(job); }
};

class Model {
 public:
  // Reads config.pbtxt, and opens the bundle in the folder of the version. Throws an Error if this
  // fails.
  explicit Model(TRITONBACKEND_Model* model);

  const std::string& name() const { return name_; }
  const std::string& version() const { return version_; }
  dlm_bundle* bundle() const { return bundle_.get(); }
  bool is_decoupled() const { return is_decoupled_; }
  bool has_text() const { return has_text_; }
  int32_t max_running() const { return max_running_; }
  int32_t max_waiting() const { return max_waiting_; }

  // Returns the compiled constraint of a request, or nullptr if it must be compiled first.
  std::shared_ptr<dlm_automaton> find_constraint(const Asked& asked);

  // Compiles the constraint of a request, and keeps it for later requests. Throws an Error if the
  // constraint cannot be compiled.
  std::shared_ptr<dlm_automaton> compile_constraint(const Asked& asked);

 private:
  struct Kept {
    int32_t kind;
    std::string content;
    std::shared_ptr<dlm_automaton> automaton;
  };

  void read_layout();

  std::string name_, version_;
  bool is_decoupled_ = false, has_text_ = false;
  int32_t max_running_ = 16, max_waiting_ = 1024;
  std::unique_ptr<dlm_bundle, Destroy> bundle_;
  // How constraints lay out JSON text. The manifest's json_layout sets these fields.
  std::string item_separator_ = ",", key_separator_ = ":";
  int32_t indent_ = -1, has_lines_ = 0;
  std::mutex mutex_;      // protects kept_
  std::list<Kept> kept_;  // last used first
};

}  // namespace dlm::triton
