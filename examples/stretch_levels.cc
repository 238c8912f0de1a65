// A DALI operator in C++ that stretches each channel of an image to the levels 0 to 255.
// The docstring of custom_operator.py has the command that compiles it.

#include <algorithm>
#include <vector>

#include "dali/pipeline/operator/operator.h"

using dali::CPUBackend;

class StretchLevels : public dali::Operator<CPUBackend> {
 public:
  explicit StretchLevels(const dali::OpSpec &spec) : Operator(spec) {}

 protected:
  // Describes the outputs, which DALI allocates.
  bool SetupImpl(std::vector<dali::OutputDesc> &outputs, const dali::Workspace &workspace) override {
    const auto &images = workspace.Input<CPUBackend>(0);
    DALI_ENFORCE(images.type() == DALI_UINT8 && images.sample_dim() == 3, "the input must be uint8 images (H, W, C)");
    outputs.resize(1);
    outputs[0].shape = images.shape();
    outputs[0].type = DALI_UINT8;
    return true;
  }

  // Processes a batch, with one task per image.
  void RunImpl(dali::Workspace &workspace) override {
    const auto &images = workspace.Input<CPUBackend>(0);
    auto &stretched = workspace.Output<CPUBackend>(0);
    stretched.SetLayout(images.GetLayout());
    auto &threads = workspace.GetThreadPool();
    for (int sample = 0; sample < images.num_samples(); sample++) {
      auto shape = images.tensor_shape(sample);
      const uint8_t *from = images.tensor<uint8_t>(sample);
      uint8_t *to = stretched.mutable_tensor<uint8_t>(sample);
      threads.AddWork([=](int) { Stretch(from, to, volume(shape), shape[2]); }, volume(shape));
    }
    threads.RunAll();
  }

 private:
  static void Stretch(const uint8_t *from, uint8_t *to, int64_t values, int64_t channels) {
    for (int64_t channel = 0; channel < channels; channel++) {
      int low = 255, high = 0;
      for (int64_t k = channel; k < values; k += channels) {
        low = std::min<int>(low, from[k]);
        high = std::max<int>(high, from[k]);
      }
      for (int64_t k = channel; k < values; k += channels)
        to[k] = (from[k] - low) * 255 / std::max(high - low, 1);
    }
  }
};

DALI_SCHEMA(StretchLevels).DocStr("Stretches each channel of an image to the levels 0 to 255.").NumInput(1).NumOutput(1);
DALI_REGISTER_OPERATOR(StretchLevels, StretchLevels, dali::CPU);  // fn.stretch_levels
