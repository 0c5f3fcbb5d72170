//! Which process a server is.

use std::fs;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, UdpSocket};

/// Where the server's work is done.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ServerProcess {
    /// By this process of this machine and its children.
    Local(u32),
    /// By this program.
    InProcess,
    /// By another machine.
    Elsewhere,
    /// Nobody can say; perhaps by this machine.
    Unknown,
}

impl ServerProcess {
    /// The one that listens on an address of this machine. Another user's process is not seen.
    #[must_use]
    pub fn listening_on(address: SocketAddr) -> Self {
        let is_here = is_here(address.ip());
        let inodes = heard_by(&listeners(), address, is_here);
        if inodes.is_empty() && !is_here {
            return Self::Elsewhere;
        }
        owner(&inodes).map_or(Self::Unknown, Self::Local)
    }

    /// Its process, if that is one of this machine's others.
    #[must_use]
    pub fn pid(self) -> Option<u32> {
        match self {
            Self::Local(pid) => Some(pid),
            _ => None,
        }
    }
}

/// Whether an address is one of this machine: no other can be bound to.
fn is_here(ip: IpAddr) -> bool {
    UdpSocket::bind(SocketAddr::new(ip, 0)).is_ok()
}

/// The sockets that hear what is sent to an address: those that listen on it, or else, if it is one
/// of this machine, on all of its addresses.
pub(super) fn heard_by(
    listeners: &[(SocketAddr, String)],
    address: SocketAddr,
    is_here: bool,
) -> Vec<String> {
    let of = |hears: &dyn Fn(IpAddr) -> bool| -> Vec<String> {
        let hear = listeners
            .iter()
            .filter(|(at, _)| at.port() == address.port() && hears(at.ip().to_canonical()));
        hear.map(|(_, inode)| format!("socket:[{inode}]")).collect()
    };
    let ip = address.ip().to_canonical();
    let exact = of(&|at| at == ip);
    if !exact.is_empty() || !is_here {
        return exact;
    }
    // One of all IPv6 addresses hears IPv4 too.
    of(&|at| at.is_unspecified() && (at.is_ipv6() || ip.is_ipv4()))
}

/// Addresses that are listened on, with the inodes of their sockets.
fn listeners() -> Vec<(SocketAddr, String)> {
    let tables = ["/proc/net/tcp", "/proc/net/tcp6"];
    let texts = tables.into_iter().filter_map(|path| fs::read_to_string(path).ok());
    texts.flat_map(|text| text.lines().filter_map(listener).collect::<Vec<_>>()).collect()
}

/// A line of a table, if its socket listens (state `0A`).
fn listener(line: &str) -> Option<(SocketAddr, String)> {
    let fields: Vec<&str> = line.split_whitespace().collect();
    let (address, state, inode) = (fields.get(1)?, fields.get(3)?, fields.get(9)?);
    let (ip, port) = address.split_once(':')?;
    let port = u16::from_str_radix(port, 16).ok()?;
    (*state == "0A").then_some((SocketAddr::new(address_of(ip)?, port), (*inode).to_owned()))
}

/// An address as the kernel writes it: words of 32 bits in hexadecimal, in the machine's order.
fn address_of(hex: &str) -> Option<IpAddr> {
    let words = hex.as_bytes().chunks(8).map(|word| {
        let word = std::str::from_utf8(word).ok()?;
        Some(u32::from_str_radix(word, 16).ok()?.to_ne_bytes())
    });
    let bytes = words.collect::<Option<Vec<_>>>()?.concat();
    if let Ok(bytes) = <[u8; 4]>::try_from(bytes.as_slice()) {
        return Some(Ipv4Addr::from(bytes).into());
    }
    <[u8; 16]>::try_from(bytes).ok().map(|bytes| Ipv6Addr::from(bytes).into())
}

/// The process that has one of these sockets open; the oldest, where several share it.
fn owner(sockets: &[String]) -> Option<u32> {
    let has_one = |pid: &u32| {
        let files = fs::read_dir(format!("/proc/{pid}/fd")).into_iter().flatten().flatten();
        let mut targets = files.filter_map(|file| fs::read_link(file.path()).ok());
        targets.any(|target| sockets.iter().any(|socket| target.as_os_str() == socket.as_str()))
    };
    let entries = fs::read_dir("/proc").ok()?.flatten();
    let pids = entries.filter_map(|entry| entry.file_name().to_str()?.parse::<u32>().ok());
    let mut pids: Vec<u32> = pids.collect();
    pids.sort_unstable();
    pids.into_iter().find(has_one)
}
