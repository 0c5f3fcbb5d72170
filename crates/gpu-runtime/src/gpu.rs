//! A GPU that is open: its driver, its context, what it is.

use std::ffi::{CStr, c_char, c_int};
use std::fmt;
use std::path::PathBuf;
use std::sync::{Arc, OnceLock};

use crate::compiler::Compiler;
use crate::driver::{Driver, Handle};
use crate::library::{Entry, Libraries, Loaded};
use crate::tensor_map::EncodeTensorMap;
use crate::{Api, DeviceChoice, GpuError, kernel_cache_dir};

/// Where a GPU's libraries and compiled kernels are.
#[derive(Clone, Debug)]
pub struct GpuOptions {
    /// Where the vendors' libraries are looked for.
    pub libraries: Libraries,
    /// The folder of compiled kernels; `None` compiles at every start.
    pub kernel_cache: Option<PathBuf>,
}

impl Default for GpuOptions {
    /// [`Libraries::system`] and [`kernel_cache_dir`] without an `XDG_CACHE_HOME`.
    fn default() -> Self {
        Self { libraries: Libraries::system(), kernel_cache: kernel_cache_dir(None) }
    }
}

/// What a device is.
#[derive(Clone, Debug)]
pub struct DeviceInfo {
    /// Whose it is.
    pub api: Api,
    /// The driver's ordinal of the device.
    pub ordinal: u32,
    /// The vendor's name.
    pub name: String,
    /// The compiler's name of the architecture: `sm_90`, `gfx942`.
    pub arch: String,
    /// The newest CUDA or HIP release that the driver serves, as the vendor counts.
    pub driver_version: u32,
    /// Multiprocessors, compute units.
    pub n_multiprocessors: u32,
    /// Threads of a warp (wavefront).
    pub warp_size: u32,
    /// Bytes of shared memory that one block can get (opt-in, see `Kernel::allow_shared`).
    pub max_shared_per_block: u32,
    /// Bytes of the L2 cache.
    pub l2_bytes: usize,
    /// Bytes of the device's memory.
    pub total_bytes: usize,
}

/// Bytes of the device's memory at one time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Memory {
    /// Not in use by any program.
    pub free: usize,
    /// All there is.
    pub total: usize,
}

/// An open GPU with its primary context. A clone is another reference to the same one; whatever is
/// made from it holds one, so that the context is released last.
///
/// It may be used from any thread: every call makes the context current on its thread first.
#[derive(Clone)]
pub struct Gpu(Arc<Device>);

struct Device {
    driver: Driver,
    context: Context,
    info: DeviceInfo,
    options: GpuOptions,
    compiler: OnceLock<Compiler>,
}

/// How a device is made current on a thread.
enum Context {
    Cuda {
        device: c_int,
        context: Handle,
        set_current: Entry<unsafe extern "C" fn(Handle) -> c_int>,
        release: unsafe extern "C" fn(c_int) -> c_int,
        set_function_attribute: Entry<unsafe extern "C" fn(Handle, c_int, c_int) -> c_int>,
        /// From CUDA 12 on.
        encode_tensor_map: Option<Entry<EncodeTensorMap>>,
    },
    Rocm {
        device: c_int,
        set_device: Entry<unsafe extern "C" fn(c_int) -> c_int>,
    },
}

impl fmt::Debug for Gpu {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Gpu").field(&self.0.info).finish()
    }
}

impl Gpu {
    /// The chosen device with the default options. `Auto` gives `None` where no driver offers a
    /// device, and `Cpu` always does.
    ///
    /// # Errors
    ///
    /// One line that says what is missing, for a device chosen by name; any failure to open a
    /// device that is there.
    pub fn open(choice: &DeviceChoice) -> Result<Option<Self>, GpuError> {
        Self::open_with(choice, GpuOptions::default())
    }

    /// As [`Gpu::open`], with options.
    ///
    /// # Errors
    ///
    /// As [`Gpu::open`].
    pub fn open_with(choice: &DeviceChoice, options: GpuOptions) -> Result<Option<Self>, GpuError> {
        match *choice {
            DeviceChoice::Cpu => Ok(None),
            DeviceChoice::Auto => {
                for api in [Api::Cuda, Api::Rocm] {
                    // A driver that does not start has no device to offer.
                    let Ok((driver, library, n)) = Driver::load(api, &options.libraries) else {
                        continue;
                    };
                    if n > 0 {
                        return Self::start(driver, &library, api, 0, options).map(Some);
                    }
                }
                Ok(None)
            }
            DeviceChoice::Cuda(ordinal) => Self::named(choice, Api::Cuda, ordinal, options),
            DeviceChoice::Rocm(ordinal) => Self::named(choice, Api::Rocm, ordinal, options),
        }
    }

    fn named(
        choice: &DeviceChoice,
        api: Api,
        ordinal: u32,
        options: GpuOptions,
    ) -> Result<Option<Self>, GpuError> {
        let (driver, library, n_devices) = Driver::load(api, &options.libraries)?;
        if ordinal >= n_devices {
            return Err(GpuError::NoDevice { choice: choice.to_string(), n_devices });
        }
        Self::start(driver, &library, api, ordinal, options).map(Some)
    }

    fn start(
        driver: Driver,
        library: &Loaded,
        api: Api,
        ordinal: u32,
        options: GpuOptions,
    ) -> Result<Self, GpuError> {
        let mut device = 0;
        // SAFETY: the device is written where it points.
        unsafe { driver.device_get(&mut device, ordinal.cast_signed()) }?;
        let info = describe(&driver, library, api, ordinal, device)?;
        let context = Context::open(&driver, library, api, device)?;
        let gpu = Device { driver, context, info, options, compiler: OnceLock::new() };
        gpu.enter()?;
        Ok(Self(Arc::new(gpu)))
    }

    /// What the device is.
    #[must_use]
    pub fn info(&self) -> &DeviceInfo {
        &self.0.info
    }

    /// Free and total memory now.
    ///
    /// # Errors
    ///
    /// A failure of the driver.
    pub fn memory(&self) -> Result<Memory, GpuError> {
        let (free, total) = self.enter()?.memory()?;
        Ok(Memory { free, total })
    }

    /// Waits for everything on the device.
    ///
    /// # Errors
    ///
    /// A failure of the driver, which may be that of an earlier launch.
    pub fn synchronize(&self) -> Result<(), GpuError> {
        let driver = self.enter()?;
        // SAFETY: the function takes nothing.
        unsafe { driver.ctx_synchronize() }
    }

    /// The driver, with this device current on the calling thread.
    pub(crate) fn enter(&self) -> Result<&Driver, GpuError> {
        self.0.enter()
    }

    pub(crate) fn options(&self) -> &GpuOptions {
        &self.0.options
    }

    /// The run-time compiler, loaded at its first use.
    pub(crate) fn compiler(&self) -> Result<&Compiler, GpuError> {
        if let Some(compiler) = self.0.compiler.get() {
            return Ok(compiler);
        }
        let compiler = Compiler::load(self.0.info.api, &self.0.options.libraries)?;
        Ok(self.0.compiler.get_or_init(|| compiler))
    }

    /// Lets a function take more than 48 KiB of dynamic shared memory. HIP has no such limit.
    pub(crate) fn set_dynamic_shared_max(&self, function: Handle, n: u32) -> Result<(), GpuError> {
        const MAX_DYNAMIC_SHARED: c_int = 8;
        let driver = self.enter()?;
        match &self.0.context {
            Context::Cuda { set_function_attribute: set, .. } => {
                // SAFETY: the caller's function lives.
                let code = unsafe { (set.call)(function, MAX_DYNAMIC_SHARED, n.cast_signed()) };
                driver.check(set.name, code)
            }
            Context::Rocm { .. } => Ok(()),
        }
    }

    /// The driver's maker of tensor maps, if it has one.
    pub(crate) fn tensor_map_encoder(&self) -> Option<&Entry<EncodeTensorMap>> {
        match &self.0.context {
            Context::Cuda { encode_tensor_map, .. } => encode_tensor_map.as_ref(),
            Context::Rocm { .. } => None,
        }
    }

    /// Whether both are the same open device.
    pub(crate) fn is(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }
}

impl Device {
    fn enter(&self) -> Result<&Driver, GpuError> {
        let driver = &self.driver;
        let (name, code) = match &self.context {
            Context::Cuda { context, set_current, .. } => {
                // SAFETY: the primary context is retained until `self` is dropped.
                (set_current.name, unsafe { (set_current.call)(*context) })
            }
            Context::Rocm { device, set_device } => {
                // SAFETY: any number may be given; it is that of a device.
                (set_device.name, unsafe { (set_device.call)(*device) })
            }
        };
        driver.check(name, code)?;
        Ok(driver)
    }
}

impl Drop for Device {
    fn drop(&mut self) {
        if let Context::Cuda { device, release, .. } = self.context {
            // SAFETY: retained once in `Context::open`; all that lives in it held `self`. A failure
            // leaves nothing to do: at the end of the process the driver is gone before us.
            let _ = unsafe { release(device) };
        }
    }
}

impl Context {
    fn open(driver: &Driver, library: &Loaded, api: Api, device: c_int) -> Result<Self, GpuError> {
        if api == Api::Rocm {
            let name = "hipSetDevice";
            // SAFETY: `hipError_t hipSetDevice(int)`.
            let call = unsafe { library.function(name)? };
            return Ok(Self::Rocm { device, set_device: Entry { name, call } });
        }
        let name = "cuCtxSetCurrent";
        // SAFETY: `CUresult cuCtxSetCurrent(CUcontext)`.
        let set_current = Entry { name, call: unsafe { library.function(name)? } };
        // SAFETY: `CUresult cuDevicePrimaryCtxRelease_v2(CUdevice)`.
        let release = unsafe { library.function("cuDevicePrimaryCtxRelease_v2")? };
        let name = "cuFuncSetAttribute";
        // SAFETY: `CUresult cuFuncSetAttribute(CUfunction, CUfunction_attribute, int)`.
        let set_function_attribute = Entry { name, call: unsafe { library.function(name)? } };
        let name = "cuTensorMapEncodeTiled";
        // SAFETY: as the type says.
        let call = unsafe { library.function(name) };
        let encode_tensor_map = call.ok().map(|call| Entry { name, call });
        let name = "cuDevicePrimaryCtxRetain";
        type Retain = unsafe extern "C" fn(*mut Handle, c_int) -> c_int;
        // SAFETY: `CUresult cuDevicePrimaryCtxRetain(CUcontext *, CUdevice)`.
        let retain: Retain = unsafe { library.function(name)? };
        let mut context = Handle::NULL;
        // SAFETY: the context is written where it points.
        driver.check(name, unsafe { retain(&mut context, device) })?;
        Ok(Self::Cuda {
            device,
            context,
            set_current,
            release,
            set_function_attribute,
            encode_tensor_map,
        })
    }
}

/// Numbers of device attributes, from `cuda.h` and from HIP's own enumeration.
struct Attributes {
    warp_size: c_int,
    n_multiprocessors: c_int,
    l2_bytes: c_int,
    max_shared_per_block: c_int,
}

const CUDA: Attributes =
    Attributes { warp_size: 10, n_multiprocessors: 16, l2_bytes: 38, max_shared_per_block: 97 };
const ROCM: Attributes =
    Attributes { warp_size: 87, n_multiprocessors: 63, l2_bytes: 19, max_shared_per_block: 74 };
const CUDA_CAPABILITY_MAJOR: c_int = 75;
const CUDA_CAPABILITY_MINOR: c_int = 76;

fn describe(
    driver: &Driver,
    library: &Loaded,
    api: Api,
    ordinal: u32,
    device: c_int,
) -> Result<DeviceInfo, GpuError> {
    let mut name = [0 as c_char; 256];
    let mut total_bytes = 0;
    let mut version = 0;
    // SAFETY: the driver writes at most 255 bytes and a zero.
    unsafe { driver.device_get_name(name.as_mut_ptr(), 255, device) }?;
    // SAFETY: the size is written where it points.
    unsafe { driver.device_total_mem(&mut total_bytes, device) }?;
    // SAFETY: the version is written where it points.
    unsafe { driver.driver_get_version(&mut version) }?;
    // SAFETY: the last byte of `name` is zero, whatever the driver wrote.
    let name = unsafe { CStr::from_ptr(name.as_ptr()) }.to_string_lossy().into_owned();
    let attributes = match api {
        Api::Cuda => CUDA,
        Api::Rocm => ROCM,
    };
    let get = |attribute| driver.attribute(attribute, device);
    let small = |attribute| get(attribute).map(|value| value as u32);
    let arch = match api {
        Api::Cuda => {
            format!("sm_{}{}", get(CUDA_CAPABILITY_MAJOR)?, get(CUDA_CAPABILITY_MINOR)?)
        }
        Api::Rocm => gcn_arch(driver, library, device)?,
    };
    Ok(DeviceInfo {
        api,
        ordinal,
        name,
        arch,
        driver_version: version.unsigned_abs(),
        n_multiprocessors: small(attributes.n_multiprocessors)?,
        warp_size: small(attributes.warp_size)?,
        max_shared_per_block: small(attributes.max_shared_per_block)?,
        l2_bytes: get(attributes.l2_bytes)?,
        total_bytes,
    })
}

/// HIP tells the architecture (`gcnArchName`) in its properties structure only, whose layout
/// changes between releases. So the structure is filled into a far larger zeroed area and the name
/// is found by its form: `gfx`, then letters and digits, up to a zero or to `:` before features.
fn gcn_arch(driver: &Driver, library: &Loaded, device: c_int) -> Result<String, GpuError> {
    type GetProperties = unsafe extern "C" fn(*mut u64, c_int) -> c_int;
    let mut area = vec![0u64; 4096];
    let name = "hipGetDevicePropertiesR0600";
    // SAFETY: `hipError_t hipGetDevicePropertiesR0600(hipDeviceProp_tR0600 *, int)`.
    let get: GetProperties = unsafe { library.function(name)? };
    // SAFETY: 32 KiB hold any release's structure, which has below 2 KiB.
    driver.check(name, unsafe { get(area.as_mut_ptr(), device) })?;
    let bytes: Vec<u8> = area.iter().flat_map(|word| word.to_ne_bytes()).collect();
    find_gfx(&bytes).ok_or_else(|| {
        GpuError::Invalid(format!("{name} tells no architecture of the form gfx942"))
    })
}

fn find_gfx(bytes: &[u8]) -> Option<String> {
    bytes.split(|&byte| byte == 0).find_map(|text| {
        let name = text.split(|&byte| byte == b':').next()?;
        let digits = name.strip_prefix(b"gfx")?;
        let is_name = !digits.is_empty() && digits.iter().all(u8::is_ascii_alphanumeric);
        is_name.then(|| String::from_utf8_lossy(name).into_owned())
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_architecture_is_found_wherever_it_lies() {
        let mut area = vec![0; 2000];
        area[..9].copy_from_slice(b"AMD gfx x");
        assert_eq!(find_gfx(&area), None);
        area[1160..1182].copy_from_slice(b"gfx90a:sramecc+:xnack-");
        assert_eq!(find_gfx(&area).as_deref(), Some("gfx90a"));
        area[1160..1182].copy_from_slice(b"gfx942\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0");
        assert_eq!(find_gfx(&area).as_deref(), Some("gfx942"));
    }
}
