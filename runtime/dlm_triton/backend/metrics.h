// The metrics of an instance, which Triton adds to its own metrics.
#pragma once

#include <string>

#include "dlm_runtime.h"
#include "triton/core/tritonbackend.h"

namespace dlm::triton {

// A metric of Triton, and its metric family. If Triton was started without metrics, set() and add()
// do nothing.
class Metric {
 public:
  Metric(TRITONSERVER_MetricKind kind, const char* name, const char* description,
         const std::string& model, const std::string& version, const std::string& instance);
  ~Metric();
  Metric(const Metric&) = delete;
  Metric& operator=(const Metric&) = delete;

  void set(double value);
  void add(double value);

 private:
  TRITONSERVER_MetricFamily* family_ = nullptr;
  TRITONSERVER_Metric* metric_ = nullptr;
};

class Metrics {
 public:
  Metrics(const std::string& model, const std::string& version, const std::string& instance);

  void add_tokens(int32_t count) { tokens_.add(count); }
  void update(const dlm_scheduler* scheduler);

 private:
  Metric running_, waiting_, passes_, tokens_;
  int64_t reported_passes_ = 0;
};

}  // namespace dlm::triton
