// What torch asks of a CUDA build before it lets fake tensors be on device "cuda", answered without a GPU: one device, one stream.
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

namespace at {
namespace {

struct CUDAHooks : CUDAHooksInterface {  // the registry looks this name up
  explicit CUDAHooks(CUDAHooksArgs) {}
  void init() const override {}
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasCUDA() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return false; }
  DeviceIndex deviceCount() const override { return 1; }
  DeviceIndex getCurrentDevice() const override { return 0; }
  DeviceIndex current_device() const override { return 0; }
};
// A CUDA build of torch registers its own, with the default priority, when it is loaded after this library.
C10_REGISTER_TYPED_CLASS_WITH_PRIORITY(CUDAHooksRegistry, "CUDAHooks", c10::REGISTRY_PREFERRED, CUDAHooks)

}  // namespace
}  // namespace at

namespace {

using c10::Device;
using c10::DeviceIndex;
using c10::DeviceType;
using c10::Stream;

struct OneDevice : c10::impl::NoOpDeviceGuardImpl<DeviceType::CUDA> {
  static Device only() { return Device(DeviceType::CUDA, 0); }
  static Stream only_stream() { return Stream(Stream::DEFAULT, only()); }

  Device getDevice() const override { return only(); }
  Device exchangeDevice(Device) const override { return only(); }
  Stream getStream(Device) const noexcept override { return only_stream(); }
  Stream getDefaultStream(Device) const override { return only_stream(); }
  Stream getNewStream(Device, int) const override { return only_stream(); }
  Stream getStreamFromGlobalPool(Device, bool) const override { return only_stream(); }
  Stream exchangeStream(Stream) const noexcept override { return only_stream(); }
  bool queryStream(const Stream&) const override { return true; }
  void synchronizeStream(const Stream&) const override {}
  void record(void**, const Stream&, DeviceIndex, c10::EventFlag) const override {}
  void block(void*, const Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void synchronizeEvent(void*) const override {}
  void destroyEvent(void*, DeviceIndex) const noexcept override {}
};

OneDevice one_device;

}  // namespace

// Called once torch is loaded: the last guard of a device is the one that torch uses.
extern "C" void register_device_guard() {
  c10::impl::DeviceGuardImplRegistrar(DeviceType::CUDA, &one_device);
}
